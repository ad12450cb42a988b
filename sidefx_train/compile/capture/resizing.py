"""``resize_`` within the memory that a tensor has: another view of it, made in place."""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train import _torch_compat as compat

aten = torch.ops.aten


def resized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Size and strides that a resize gives a tensor, where its memory and the rest of it stay as they are."""
    if func not in (aten.resize_.default, aten.resize_as_.default) or any(v is not None for v in kwargs.values()):
        return None
    given, wanted = args[:2]
    size = tuple(wanted.shape) if func is aten.resize_as_.default else tuple(wanted)
    numbers = (*size, *given.shape, given.storage_offset(), given.untyped_storage().nbytes())
    if not all(isinstance(n, int) for n in numbers) or size == tuple(given.shape):
        return None
    strides = tuple(torch.empty(size, device="meta").stride())
    end = given.storage_offset() + (torch.Size(size).numel())
    if end * given.itemsize > given.untyped_storage().nbytes():
        return None
    return size, strides


def turn(given: torch.Tensor, size: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Gives a tensor another layout; a resize is no write for its version counter."""
    with compat.below_autograd():
        aten.as_strided_.default(given, size, strides, given.storage_offset())
    return given
