"""Shadows of tensors, NumPy arrays, weak references and exceptions."""
