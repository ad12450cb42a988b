"""Expansions to a tensor's own size, and writes through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten


def keeps_elements(x: torch.Tensor, sizes: Sequence[Any]) -> bool:
    """Returns True if an expansion to some sizes shows each element once."""
    new = len(sizes) - x.dim()
    return all(_is_one(size) for size in sizes[:new]) and all(
        _is_one(size) or _is_same(size, old) for size, old in zip(sizes[new:], x.shape, strict=True)
    )


def unexpanded(x: torch.Tensor, sizes: Sequence[Any]) -> torch.Tensor:
    """Returns a view in place of such an expansion: of a write to one, functionalization adds the difference, which
    rounds, and is NaN where an infinity was."""
    new = len(sizes) - x.dim()
    own = [aten.sym_size.int(x, i) if type(size) is int and size == -1 else size for i, size in enumerate(sizes[new:])]
    return aten.view.default(x, [*sizes[:new], *own])  # type: ignore[no-any-return]


def _is_one(size: Any) -> bool:
    return type(size) is int and size == 1


def _is_same(size: Any, old: Any) -> bool:
    """Returns True for the size that a dimension has, without asking what symbols stand for."""
    if type(size) is int:
        return size == -1 or (type(old) is int and size == old)
    return type(old) is not int and bool(size.node.expr == old.node.expr)
