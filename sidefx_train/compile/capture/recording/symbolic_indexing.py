"""Indexing of tensors by integers that change between calls (``data[i]``, ``cache[:, step]``).

The C code of ``tensor[...]`` would read the integer's value, which would be guarded. It processes an index from left to
right, one view per part. This module makes the same views one by one; ``select`` accepts a symbolic integer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.sentinels import ABSENT

PLAIN = (int, torch.SymInt, slice, type(None), type(Ellipsis))


def decided(index: Any) -> Any:
    """Returns an index with decided truth values in place of those that change, which C++ code takes for integers."""
    if type(index) is torch.SymBool:
        return bool(index)
    if type(index) is slice:
        bounds = (index.start, index.stop, index.step)
        return slice(*map(decided, bounds)) if any(type(bound) is torch.SymBool for bound in bounds) else index
    if type(index) is tuple or type(index) is list:
        parts = [*map(decided, index)]
        return index if all(map(operator.is_, parts, index)) else type(index)(parts)
    return index


def view_of(
    tensor: torch.Tensor,
    index: Any,
    run: Callable[..., Any],
    grant: Callable[[Any, bool], bool] | None = None,
    clamp: Callable[[slice, Any], Any] | None = None,
) -> Any:
    """Returns the view ``tensor[index]``, made by one operation per part of the index.

    Args:
        tensor: the indexed tensor.
        index: an integer, or a tuple of integers, slices, ``None`` and at most one ``Ellipsis``.
        run: called with ``(function, args, kwargs)``; returns the function's result.
        grant: assumes a condition on a number that only the graph knows; returns False if that is not possible.
        clamp: returns bounds inside a size for a slice whose bounds only the graph knows; ``None`` if it cannot. It is
            not given where such slices stay as they are.

    Returns:
        The view; :data:`~sidefx_train.compile.capture.interpreter.world.ABSENT` if no integer of the index is symbolic,
        or if the index has other parts (tensors, lists, bools) or does not fit.
    """
    parts = index if type(index) is tuple else (index,)
    clamped = [clamp is not None and type(part) is slice and _is_unknown(part) for part in parts]
    if not any(clamped) and not any(type(part) is torch.SymInt for part in parts):
        return ABSENT
    if not all(type(part) in PLAIN for part in parts):
        return ABSENT
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    if taken > tensor.dim() or sum(part is Ellipsis for part in parts) > 1:
        return ABSENT
    dim, left = 0, tensor.dim() - taken
    for part, unknown in zip(parts, clamped, strict=True):
        if part is Ellipsis:
            dim += left
        elif part is None:
            tensor, dim = run(torch.Tensor.unsqueeze, (tensor, dim), {}), dim + 1
        elif unknown and clamp is not None:
            place = clamp(part, tensor.shape[dim])
            if place is None:
                return ABSENT
            tensor, dim = run(torch.ops.aten.slice.Tensor, (tensor, dim, *place), {}), dim + 1
        elif type(part) is slice:
            if any(bound is not None for bound in (part.start, part.stop, part.step)):
                tensor = run(torch.Tensor.__getitem__, (tensor, (slice(None),) * dim + (part,)), {})
            dim += 1
        elif type(part) is torch.SymInt and compat.is_unbacked(part):
            place = _within(part, tensor.shape[dim], grant)
            if place is None:
                return ABSENT
            tensor = run(torch.Tensor.select, (tensor, dim, place), {})
        elif not -tensor.shape[dim] <= part < tensor.shape[dim]:
            return ABSENT
        else:
            tensor = run(torch.Tensor.select, (tensor, dim, part), {})
    return tensor


def _is_unknown(part: slice) -> bool:
    bounds = (part.start, part.stop)
    return part.step in (None, 1) and any(type(each) is torch.SymInt and compat.is_unbacked(each) for each in bounds)


def _within(place: torch.SymInt, size: Any, grant: Callable[[Any, bool], bool] | None) -> Any:
    """Returns an index that only the graph knows, counted from the start, under the assumption that it is in range;
    ``None`` if that cannot be assumed.

    Generated code finds out that the assumption does not hold when it has read the element: it never reads elsewhere.
    """
    if grant is None or (type(size) is torch.SymInt and compat.is_unbacked(size)) or size < 1:
        return None
    for condition in (place >= -size, place < size):
        if not (condition is True or grant(condition, True)):
            return None
    return place % size
