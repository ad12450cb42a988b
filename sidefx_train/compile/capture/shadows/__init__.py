"""Shadows: what stands for an outside object during a capture, with its real object and its source."""
