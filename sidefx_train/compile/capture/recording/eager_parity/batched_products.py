"""``matmul`` of two batches of matrices of which one batch has one matrix.

If that matrix needs no gradient, eager expands it and multiplies batches. For a fake tensor torch drops the batch
dimension and multiplies matrices, which rounds differently. So the tensor is expanded before.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from sidefx_train import torch_compat as compat

_NAMES = frozenset({"matmul", "linalg_matmul", "__matmul__", "__rmatmul__", "aten::matmul"})


def expanded(fn: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Returns a function of torch and its positional arguments, as they are or with one of them expanded."""
    if type(fn) is FunctionType and fn is not torch.Tensor.__rmatmul__:
        return fn, args
    name = fn.name() if isinstance(fn, compat.OpOverload) else getattr(fn, "__name__", None)
    if name not in _NAMES:
        return fn, args
    owner = getattr(fn, "__self__", None)
    factors = (owner, *args) if type(owner) is compat.FakeTensor else args
    if len(factors) != 2 or not all(type(each) is compat.FakeTensor and each.dim() == 3 for each in factors):
        return fn, args
    for one, other in (factors, factors[::-1]):
        if _is_one(one.shape[0]) and not _is_one(other.shape[0]) and not one.requires_grad:
            batch = one.expand(other.shape[0], -1, -1)
            with_batch = tuple(batch if each is one else each for each in factors)
            return (torch.matmul, with_batch) if factors is not args else (fn, with_batch)
    return fn, args


def _is_one(size: Any) -> bool:
    return type(size) is int and size == 1
