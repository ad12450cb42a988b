"""Effects of a step on Python objects (`capture/side_effects`, `residual`)."""
