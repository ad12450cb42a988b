"""Bodies run by CPython, interpreted, and in captured steps; most need no torch."""
