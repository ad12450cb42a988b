"""Shadows: objects that replace outside objects during a capture, with the real object and its source."""
