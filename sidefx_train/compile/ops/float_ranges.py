"""``torch.arange`` between floats that change from call to call: the prologue computes its length."""

from __future__ import annotations

import math
from typing import Any

import torch

from sidefx_train.compile.ops.registration import define_operator


def range_length(start: float, end: float, step: float) -> int:
    """Returns the number of elements of ``torch.arange(start, end, step)``, as its C++ code computes it."""
    return math.ceil((float(end) - float(start)) / float(step))


def _range(start: Any, end: Any, step: Any, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.arange(start, end, step, dtype=dtype, device=device)


def _range_fake(start: Any, end: Any, step: Any, length: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty((length,), dtype=dtype, device=device)


define_operator(
    "float_range(Scalar start, Scalar end, Scalar step, SymInt length, ScalarType dtype, Device device) -> Tensor",
    _range,
    _range_fake,
    key="CompositeExplicitAutograd",
)
