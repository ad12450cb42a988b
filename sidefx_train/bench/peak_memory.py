"""Measures the peak of tensor memory of one step with torch's allocator, without imports and compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sidefx_train import torch_compat as compat


def held_mb(step: Callable[[Any], Any], batch: Any) -> float:
    """Returns the peak of MiB that a step has allocated, above what is allocated when it begins.

    Parameters, optimizer state and the batch exist before and do not count; gradients and tensors saved for the
    backward do.
    """
    held = peak = 0
    for change in compat.allocations(lambda: step(batch)):
        held += change
        peak = max(peak, held)
    return peak / 2**20
