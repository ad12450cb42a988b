"""In-place operations, views and Python numbers out of the graph."""
