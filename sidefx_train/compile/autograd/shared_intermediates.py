"""Intermediates that do not leave the step but get gradients from several parts of the backward.

The gates of an ``LSTMCell`` are used by the new cell state and, past it, by the output. If each part of the backward
continued from there on its own, everything before would be differentiated several times, and the sums would round
differently from eager's, which adds first. So the backward is split at such values too: they become hidden results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from sidefx_train import torch_compat as compat

Edge = tuple[Any, int]
Levels = list[tuple[tuple[Any, ...], tuple[Any, ...]]]


@dataclass(frozen=True)
class Hidden:
    """An intermediate as autograd knows it.

    Attributes:
        grad_fn: the node that made it.
        output_nr: index of the node's output.
    """

    grad_fn: Any
    output_nr: int

    @property
    def edge(self) -> GradientEdge:
        """The edge of its gradient."""
        return GradientEdge(self.grad_fn, self.output_nr)

    def empty(self) -> torch.Tensor | None:
        """Returns a tensor of its shape and dtype; ``None`` if the shape is symbolic."""
        shape, dtype, device = compat.output_of(self.grad_fn, self.output_nr)
        return torch.empty(shape, dtype=dtype, device=device) if all(isinstance(n, int) for n in shape) else None


def shared_values(levels: Levels, root_of: Callable[[Any], Any], ends: set[Edge]) -> list[Hidden]:
    """Returns the values before ``ends`` where the backward passes of several levels meet."""
    reached = [_nodes([root_of(place) for place in results], ends) for results, _ in levels]
    times: dict[Any, int] = {}
    for nodes in reached:
        for node in nodes:
            times[node] = times.get(node, 0) + 1
    found: dict[Edge, None] = {}
    for nodes in reached:
        for node in nodes:
            if times[node] == 1:
                met = [edge for edge in node.next_functions if times.get(edge[0], 0) > 1 and edge not in ends]
                found |= dict.fromkeys(met)
    return [Hidden(*edge) for edge in found]


def _nodes(roots: list[Any], ends: set[Edge]) -> dict[Any, None]:
    """Returns the nodes that the backward of some roots runs, without leaves."""
    seen: dict[Any, None] = {}
    waiting = [root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and not hasattr(node, "variable"):
            seen[node] = None
            waiting += [edge[0] for edge in node.next_functions if edge not in ends]
    return seen
