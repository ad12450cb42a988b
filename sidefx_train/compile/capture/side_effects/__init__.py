"""Side effects of a step on Python objects."""
