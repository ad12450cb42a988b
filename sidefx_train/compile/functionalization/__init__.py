"""Removes in-place operations, views and Python numbers from the graph."""
