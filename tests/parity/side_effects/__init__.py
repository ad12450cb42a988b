"""What a step does to Python objects (`capture/side_effects`, `residual`)."""
