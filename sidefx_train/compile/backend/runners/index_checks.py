"""Checks index inputs before a step runs, so that a bad label stops it before anything is changed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sidefx_train.compile.graph.artifacts import GraphInput, IndexCheck
from sidefx_train.compile.native import native_module


def index_checker(check: IndexCheck, given: GraphInput) -> Callable[[torch.Tensor], None]:
    """Returns a function that raises ``IndexError`` if eager could raise for the values of an index input."""
    low, high, ignore = check.low, check.high, check.ignore
    example, source = given.example, given.source

    def thorough(index: torch.Tensor) -> None:
        bad = (index < low) | (index >= high)
        if ignore is not None:
            bad &= index != ignore
        if bool(bad.any()):
            value = index[bad].flatten()[0].item()
            raise IndexError(f"{source} holds {value}, which is outside [{low}, {high})")

    native = native_module()
    fits = example.dtype == torch.int64 and example.is_contiguous() and isinstance(example.numel(), int)
    if native is None or not fits:
        return thorough
    bad_index, numel, allowed = native.bad_index, example.numel(), low if ignore is None else ignore

    def quick(index: torch.Tensor) -> None:
        if bad_index(index, numel, low, high, allowed):
            thorough(index)

    return quick
