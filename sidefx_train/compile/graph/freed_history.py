"""Whether the autograd history of a value leads to a graph that a backward pass has freed."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from sidefx_train import torch_compat as compat


def is_freed(freed: Set[Any], node: Any) -> bool:
    """Returns True if a backward pass from ``node`` raises that its graph is freed.

    Nodes that save no tensors, such as those of sums, can run again.

    Args:
        freed: nodes of the graphs that backward passes have freed.
        node: autograd node of a value; ``None`` for a leaf.
    """
    seen, waiting = set[Any](), [node] if freed and node is not None else []
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in freed and compat.saved_are_released(current):
            return True
        waiting += [before for before, _ in current.next_functions if before is not None]
    return False
