"""Gradients as the engine adds them up: one contribution per use, in the order in which the uses are differentiated.

Adding floats in another order gives another sum. Where something outside contributes to the gradient of a tensor too,
the contributions of the captured part are handed to the engine one by one, and it adds all of them up in eager's order:
for the backends that compute operation by operation, the others add in an order of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

_MOST = 8
"""Uses of one tensor of which each gets a gradient of its own in memory; more are added up in the graph."""


@dataclass
class Uses:
    """What was computed from a tensor.

    Attributes:
        grads: what each use contributes to its gradient, in the order of the backward.
        places: where each use stands in the order of the forward.
        last: the greatest of all places, of uses that contribute nothing too.
    """

    grads: list[torch.Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    last: int = -1


@contextmanager
def contributions(roots: list[torch.Tensor], edges: list[Any]) -> Iterator[list[Uses]]:
    """Notes what a backward adds to the gradient of each edge, while it runs."""
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
    """The place, in the order of the forward, of what a view made of ``edge`` first; -1 if it was not made of that."""
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
    """True if a gradient may be handed over in parts: few, and each what the engine would add as it is."""
    same_kind = all((part.shape, part.dtype) == (accumulated.shape, accumulated.dtype) for part in parts)
    return 1 < len(parts) <= _MOST and same_kind
