"""Substitutes for builtin functions that call back into Python code."""
