"""Torch's thread-wide and global state around a step."""
