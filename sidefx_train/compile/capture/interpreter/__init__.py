"""Bytecode interpreter for CPython 3.11 to 3.14. It does not import torch, which a test enforces."""
