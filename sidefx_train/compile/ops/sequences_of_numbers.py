"""``linspace``, windows, ranges and indices of symbolic lengths; torch's operators want plain numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

from sidefx_train.compile.ops.registration import define_operator

FUNCTIONS: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(
            torch.linspace,
            torch.logspace,
            torch.hann_window,
            torch.hamming_window,
            torch.blackman_window,
            torch.bartlett_window,
        ),
        torch.kaiser_window,
    )
}
"""By name: the functions that the operator calls."""
SPACED = ("linspace", "logspace")
"""Those of a start and an end."""


def _made(name: str, numbers: list[Any], length: int, dtype: torch.dtype) -> Any:
    """Calls ``linspace(start, end, length)``, or ``window(length, periodic, ...)``."""
    if name in SPACED:
        start, end, *base = numbers
        return FUNCTIONS[name](start, end, length, *base, dtype=dtype, device="cpu")
    return FUNCTIONS[name](length, bool(numbers[0]), *numbers[1:], dtype=dtype, device="cpu")


def _fake(name: str, numbers: list[Any], length: Any, dtype: torch.dtype) -> Any:
    return torch.empty(length, dtype=dtype, device="cpu")


define_operator(
    "sequence_of_numbers(str name, Scalar[] numbers, SymInt length, ScalarType dtype) -> Tensor",
    _made,
    _fake,
    key="CompositeExplicitAutograd",
)


# --- ranges between floats: the prologue computes their length


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


# --- indices of triangles: the prologue computes their number


def triangle_size(lower: bool, rows: int, columns: int, offset: int) -> int:
    """Returns the number of elements of a matrix up to a diagonal, or from it on."""
    up_to = sum(min(max(row + offset + lower, 0), columns) for row in range(rows))
    return up_to if lower else rows * columns - up_to


def _triangle(lower: bool, rows: int, columns: int, offset: int, length: int, device: torch.device) -> torch.Tensor:
    made = torch.tril_indices if lower else torch.triu_indices
    return made(rows, columns, offset, device=device)


def _triangle_fake(
    lower: bool, rows: Any, columns: Any, offset: Any, length: Any, device: torch.device
) -> torch.Tensor:
    return torch.empty((2, length), dtype=torch.int64, device=device)


define_operator(
    "triangle_indices(bool lower, SymInt rows, SymInt columns, SymInt offset, SymInt length, Device device) -> Tensor",
    _triangle,
    _triangle_fake,
    key="CompositeExplicitAutograd",
)
