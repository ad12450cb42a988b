"""Builtin functions that call back into Python code: the interpreter's own versions."""
