"""Which kernel computes a node: candidates are timed once, and the choice is kept on disk."""
