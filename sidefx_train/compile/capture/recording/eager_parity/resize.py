"""``resize_`` within the tensor's storage is an in-place view; a larger size needs a storage resize."""

from __future__ import annotations

import math
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.type_checks import safe_isinstance

aten = torch.ops.aten


def resized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Returns the size and strides after a resize within the tensor's storage, else ``None``."""
    size = _new_size(func, args, kwargs)
    if size is None or _needs_more(args[0], size):
        return None
    if size == tuple(args[0].shape):  # nothing at all
        return size, tuple(args[0].stride())
    return size, tuple(torch.empty(size, device="meta").stride())


def enlarged(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Returns the size after a resize that needs a larger storage, else ``None``."""
    size = _new_size(func, args, kwargs)
    return size if size is not None and _needs_more(args[0], size) else None


def _new_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    if func not in (aten.resize_.default, aten.resize_as_.default) or any(v is not None for v in kwargs.values()):
        return None
    given, wanted = args[:2]
    size = tuple(wanted.shape) if func is aten.resize_as_.default else tuple(wanted)
    numbers = (*size, *given.shape, given.storage_offset(), given.untyped_storage().nbytes())
    if any(not safe_isinstance(n, int) and compat.is_unbacked(n) for n in numbers):
        return None
    return size


def _needs_more(given: torch.Tensor, size: tuple[int, ...]) -> bool:
    if size == tuple(given.shape):
        return False
    end = given.storage_offset() + math.prod(size)
    return end * given.itemsize > given.untyped_storage().nbytes()


def set_layout(given: torch.Tensor, size: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Sets a tensor's layout; a resize does not increment its version counter."""
    if (size, strides) == (tuple(given.shape), tuple(given.stride())):
        return given
    with compat.below_autograd():
        aten.as_strided_.default(given, size, strides, given.storage_offset())
    return given
