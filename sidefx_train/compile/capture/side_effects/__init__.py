"""What a step did to Python objects."""
