"""C functions that the capture runs its own way."""
