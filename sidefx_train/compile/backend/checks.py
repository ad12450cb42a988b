"""Checks of index inputs before a step runs, so that a bad label stops it before it has changed anything."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sidefx_train.compile.artifacts import IndexCheck


def index_checker(check: IndexCheck, source: str) -> Callable[[torch.Tensor], None]:
    """A function that raises ``IndexError`` where eager could raise for the values of an index input."""
    low, high, ignore = check.low, check.high, check.ignore

    def run(index: torch.Tensor) -> None:
        if index.numel() == 0:
            return
        smallest, largest = torch.aminmax(index)
        if smallest.item() >= low and largest.item() < high:
            return
        bad = (index < low) | (index >= high)
        if ignore is not None:
            bad &= index != ignore
        if bool(bad.any()):
            value = index[bad].flatten()[0].item()
            raise IndexError(f"{source} holds {value}, which is outside [{low}, {high})")

    return run
