"""Checks index inputs before a step runs, so that a bad label stops it before anything is changed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sidefx_train.compile.graph.artifacts import GraphInput, IndexCheck
from sidefx_train.compile.native import native_module


def index_checker(check: IndexCheck, given: GraphInput) -> Callable[[torch.Tensor], None]:
    """Returns a function that raises ``IndexError`` if eager could raise for the used values of an index input."""
    used = _selection(check)
    if used is None:
        return _checker(check, given.example, given.source)
    static = all(isinstance(size, int) for size in given.example.shape)
    check_part = _checker(check, used(given.example).contiguous() if static else given.example, given.source)

    def thorough(index: torch.Tensor) -> None:
        check_part(used(index).contiguous())

    if not static or given.example.numel() > _FEW:
        return thorough
    return _with_quick_check(check, given.example, thorough)


_FEW = 8192
"""Values that are all checked in less time than the used part of them is selected."""


def _checker(check: IndexCheck, example: torch.Tensor, source: str) -> Callable[[torch.Tensor], None]:
    """Returns a check of all values of tensors like ``example``."""
    low, high, ignore = check.low, check.high, check.ignore

    def thorough(index: torch.Tensor) -> None:
        bad = (index < low) | (index >= high)
        if ignore is not None:
            bad &= index != ignore
        if bool(bad.any()):
            value = index[bad].flatten()[0].item()
            raise IndexError(f"{source} holds {value}, which is outside [{low}, {high})")

    return _with_quick_check(check, example, thorough)


def _with_quick_check(
    check: IndexCheck, example: torch.Tensor, thorough: Callable[[torch.Tensor], None]
) -> Callable[[torch.Tensor], None]:
    """Returns a function that calls ``thorough`` only for tensors that have a value outside, in a used part or not."""
    low, high, ignore = check.low, check.high, check.ignore
    native = native_module()
    fits = example.dtype == torch.int64 and example.is_contiguous() and isinstance(example.numel(), int)
    if native is None or not fits:
        return thorough
    bad_index, numel, allowed = native.bad_index, example.numel(), low if ignore is None else ignore

    def quick(index: torch.Tensor) -> None:
        if bad_index(index, numel, low, high, allowed):
            thorough(index)

    return quick


_SELECTING: dict[str, Callable[..., torch.Tensor]] = {
    "select": torch.ops.aten.select.int,
    "slice": torch.ops.aten.slice.Tensor,
    "t": torch.ops.aten.t.default,
    "transpose": torch.ops.aten.transpose.int,
    "unsqueeze": torch.ops.aten.unsqueeze.default,
}


def _selection(check: IndexCheck) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns a function that selects the used values of an input; ``None`` if all are used."""
    if not check.selected:
        return None
    calls = [(_SELECTING[name], args) for name, args in check.selected]

    def used(index: torch.Tensor) -> torch.Tensor:
        for call, args in calls:
            index = call(index, *args)
        return index

    return used
