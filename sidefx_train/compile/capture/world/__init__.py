"""The interpreter's environment over shadows: attributes, calls of C functions, what is deferred."""
