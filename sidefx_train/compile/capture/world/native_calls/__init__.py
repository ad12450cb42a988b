"""C functions that the capture handles specially."""
