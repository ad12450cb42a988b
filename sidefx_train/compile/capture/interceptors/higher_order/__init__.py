"""Interceptors for operators that call functions: ``torch.cond``, loops, and those of ``torch.func``."""
