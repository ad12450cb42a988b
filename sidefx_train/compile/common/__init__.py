"""What several stages share and what imports none of them."""
