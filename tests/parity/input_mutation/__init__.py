"""Outside tensors that a step writes (`functionalization`, `residual`)."""
