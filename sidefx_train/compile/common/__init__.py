"""Rules and helpers shared by several stages; imports none of them."""
