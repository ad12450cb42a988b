"""Bugs once found, one test each."""
