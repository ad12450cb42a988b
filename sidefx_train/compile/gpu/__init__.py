"""Training steps on GPUs."""
