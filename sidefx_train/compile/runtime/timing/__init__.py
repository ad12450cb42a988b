"""Times of a step: its overhead over the graph, and captured steps against eager ones."""
