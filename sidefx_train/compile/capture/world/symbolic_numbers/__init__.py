"""Symbolic numbers, which change between calls: their truth, errors and subclasses."""
