"""Tensors of the outside that a step writes (`functionalization`, `residual`)."""
