"""The interpreter's world over shadows: attributes, calls of C functions, deferred calls."""
