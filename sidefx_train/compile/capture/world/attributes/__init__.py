"""Attributes that C code answers, and those that the capture answers in its place."""
