"""Calls, text and warnings that only show or record something: they are kept for after the graph."""
