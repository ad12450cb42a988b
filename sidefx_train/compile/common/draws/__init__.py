"""Random numbers that the prologue of a step draws."""
