"""How much tensor memory one step holds at its peak, by torch's allocator: imports and compilers are not in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sidefx_train import torch_compat as compat


def held_mb(step: Callable[[Any], Any], batch: Any) -> float:
    """MiB that a step has allocated at most at once, above what is allocated when it begins.

    Parameters, optimizer state and the batch are there before and do not count; gradients and whatever is saved for the
    backward do.
    """
    held = peak = 0
    for change in compat.allocations(lambda: step(batch)):
        held += change
        peak = max(peak, held)
    return peak / 2**20
