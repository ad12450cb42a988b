"""Answers questions about the sizes and strides of tensors, fake ones included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sidefx_train import torch_compat as compat


def is_static(t: torch.Tensor) -> bool:
    """Returns True if no size or stride is symbolic."""
    return all(isinstance(n, int) for n in (*t.shape, *t.stride()))


def is_dense(t: torch.Tensor) -> bool:
    """Returns True if elements lie one after another, in any order of dimensions; adds no guard."""
    return _are_consecutive(sorted((stride, size) for size, stride in hinted_layout(t)))


def is_dense_in(t: torch.Tensor, order: list[int]) -> bool:
    """Returns True if elements lie one after another in this order of dimensions, outermost first.

    Comparisons of symbolic sizes become guards.
    """
    return _are_consecutive((t.stride(d), t.shape[d]) for d in reversed(order))


def _are_consecutive(dims: Iterable[tuple[Any, Any]]) -> bool:
    """Returns True if each (stride, size), innermost first, continues where the one before it ends."""
    expected: Any = 1
    for stride, size in dims:
        if size != 1:
            if stride != expected:
                return False
            expected = expected * size
    return True


def may_overlap(t: torch.Tensor) -> bool:
    """Returns True if several elements of a tensor may be one in memory; adds no guard.

    If a size exists only when the graph runs, an expanded tensor counts as such, another one does not.
    """
    if any(not isinstance(number, int) and compat.is_unbacked(number) for number in (*t.shape, *t.stride())):
        return any(isinstance(stride, int) and stride == 0 for stride in t.stride())
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in hinted_layout(t) if size != 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def hinted_layout(t: torch.Tensor) -> list[tuple[int, int]]:
    """Returns (size, stride) of each dimension; for symbolic ones their values in this capture."""
    return [(hint(size), hint(stride)) for size, stride in zip(t.shape, t.stride(), strict=True)]


def hint(number: Any) -> int:
    """Returns a number, or the value of a symbolic one in this capture."""
    return number if isinstance(number, int) else compat.hint_of(number)


def last_offset(t: torch.Tensor) -> Any:
    """Returns the distance from the first element to the last one in memory, in elements."""
    return sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def fills_its_range(t: torch.Tensor) -> bool:
    """Returns True if a tensor has as many elements as its memory range; a comparison of symbols becomes a guard."""
    return bool(last_offset(t) + 1 == t.numel())


def extent(t: torch.Tensor) -> tuple[int, int]:
    """Returns the byte offsets of a strided tensor's begin and end in its storage."""
    start = t.storage_offset()
    return start * t.itemsize, (start + last_offset(t) + 1) * t.itemsize
