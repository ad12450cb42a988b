"""Gradient contributions as the engine adds them: one per use, in the order in which the uses are differentiated.

Floating point sums depend on the order. If the gradient of a tensor also has outside contributions, the captured part
passes its contributions to the engine one by one, and the engine adds all of them in eager's order. Backends that run
operation by operation do this; the others add in their own order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

_MOST = 8
"""Limit of uses of one tensor that each get a gradient in memory; more are added in the graph."""


@dataclass
class Uses:
    """Uses of a tensor.

    Attributes:
        grads: contribution of each use to its gradient, in backward order.
        places: position of each use in the forward.
        last: the last of all positions, including uses without a contribution.
    """

    grads: list[torch.Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    last: int = -1


@contextmanager
def contributions(roots: list[torch.Tensor], edges: list[Any]) -> Iterator[list[Uses]]:
    """Records what a running backward adds to the gradient of each edge."""
    place = {(edge.node, edge.output_nr): i for i, edge in enumerate(edges)}
    found = [Uses() for _ in edges]

    def note(reached: list[tuple[int, int]], made: int) -> Callable[[Any, Any], None]:
        def after(grads: tuple[torch.Tensor | None, ...], _: Any) -> None:
            for argument, edge in reached:
                grad = grads[argument]
                if grad is not None:
                    found[edge].grads.append(grad)
                    found[edge].places.append(made)

        return after

    handles = []
    seen: set[Any] = {None}
    waiting = [root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        reached = [(i, place[edge]) for i, edge in enumerate(node.next_functions) if edge in place]
        for _, edge in reached:
            found[edge].last = max(found[edge].last, node._sequence_nr())
        if reached:
            handles.append(node.register_hook(note(reached, node._sequence_nr())))
        waiting += [following for following, _ in node.next_functions]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def first_use(value: torch.Tensor, edge: tuple[Any, int]) -> int:
    """Returns the forward position of the first use of ``edge`` on the way to a view; -1 if it is not a view of
    that."""
    found, seen, waiting = -1, set[Any]({None}), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if edge in node.next_functions:
            found = max(found, node._sequence_nr())  # type: ignore[attr-defined]
        else:
            waiting += [following for following, _ in node.next_functions]  # type: ignore[union-attr]
    return found


def one_by_one(parts: list[torch.Tensor], accumulated: torch.Tensor) -> bool:
    """Returns True if a gradient may be passed in parts: few, and each what the engine would add itself."""
    same_kind = all((part.shape, part.dtype) == (accumulated.shape, accumulated.dtype) for part in parts)
    return 1 < len(parts) <= _MOST and same_kind
