"""Indexing of tensors by integers that change from call to call (``data[i]``, ``cache[:, step]``).

The C code behind ``tensor[...]`` asks such an integer for its value, which would be guarded. It takes an index apart
from left to right, each part a view of what the part before gave; here the same views are made one by one, and
``select`` takes the integer as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sidefx_train.compile.common.sentinels import ABSENT

_PLAIN = (int, torch.SymInt, slice, type(None), type(Ellipsis))


def view_of(tensor: torch.Tensor, index: Any, run: Callable[..., Any]) -> Any:
    """The view that ``tensor[index]`` is, made by one operation per part of the index.

    Args:
        tensor: what is indexed.
        index: an integer, or a tuple of integers, slices, ``None`` and at most one ``Ellipsis``.
        run: ``(function, args, kwargs)`` -> what the function returns.

    Returns:
        The view; :data:`~sidefx_train.compile.capture.interpreter.world.ABSENT` where no integer of the index changes
        from call to call, or the index has other parts (tensors, lists, bools), or does not fit.
    """
    parts = index if type(index) is tuple else (index,)
    if not any(type(part) is torch.SymInt for part in parts) or not all(type(part) in _PLAIN for part in parts):
        return ABSENT
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    if taken > tensor.dim() or sum(part is Ellipsis for part in parts) > 1:
        return ABSENT
    dim, left = 0, tensor.dim() - taken
    for part in parts:
        if part is Ellipsis:
            dim += left
        elif part is None:
            tensor, dim = run(torch.Tensor.unsqueeze, (tensor, dim), {}), dim + 1
        elif type(part) is slice:
            if any(bound is not None for bound in (part.start, part.stop, part.step)):
                tensor = run(torch.Tensor.__getitem__, (tensor, (slice(None),) * dim + (part,)), {})
            dim += 1
        elif not -tensor.shape[dim] <= part < tensor.shape[dim]:
            return ABSENT
        else:
            tensor = run(torch.Tensor.select, (tensor, dim, part), {})
    return tensor
