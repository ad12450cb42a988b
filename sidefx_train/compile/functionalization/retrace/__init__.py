"""Runs a captured graph again under functionalization, which records a graph without in-place operations."""
