"""Autotuning: candidates for a node's kernel are timed once, and the times are cached on disk."""
