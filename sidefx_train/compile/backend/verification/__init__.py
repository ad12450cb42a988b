"""A compiled graph is compared with the captured graph before it is trusted."""
