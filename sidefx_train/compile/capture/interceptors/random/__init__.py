"""Random generators: what they draw, and their states."""
