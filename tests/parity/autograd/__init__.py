"""Backward, hooks and derivatives (`autograd`, `hooks`)."""
