"""Shadows of lists, dicts, sets, iterators, closure cells and namespaces."""
