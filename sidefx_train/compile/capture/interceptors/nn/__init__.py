"""Interceptors for functions of ``torch.nn``."""
