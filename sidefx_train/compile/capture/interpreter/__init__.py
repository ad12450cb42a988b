"""A bytecode interpreter for CPython 3.11 to 3.13. It needs no torch, which a test holds it to."""
