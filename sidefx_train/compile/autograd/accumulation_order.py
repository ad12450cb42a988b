"""When what is made: the engine goes back first through what was made last, and adds up gradients as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from sidefx_train.compile.autograd.gradient_contributions import Uses, first_use, one_by_one
from sidefx_train.compile.residual.view_replay import IntermediateView

Place = tuple[Literal["input", "result", "view", "detour", "hidden"], int]
"""What a gradient goes to; hidden are values that do not leave."""

Point = tuple[Literal["stage", "view"], int]
"""What is made outside, as a node of autograd."""

Grads = tuple[tuple[Place, torch.Tensor], ...]


def times(
    views: tuple[IntermediateView, ...],
    edges: dict[Place, tuple[Any, int]],
    ready: dict[Place, int],
    uses: list[dict[Place, Uses]],
) -> tuple[int, ...]:
    """The stage before which each view is made: the engine goes back first through what was made last."""
    needed: dict[Place, int] = {}
    for stage in reversed(range(len(uses))):
        needed |= dict.fromkeys(uses[stage], stage)
    times: list[int] = []
    for i, view in reversed(list(enumerate(views))):
        stages = range(ready["view", i], needed.get(("view", i), len(uses)))
        base = _origin(view, edges)
        made = first_use(view.value, edges[base]) if base in edges else -1
        using_stages = (k for k in stages if base in uses[k] and uses[k][base].last > made)
        times.append(next(using_stages, stages.stop))
        for place in {base, view.base}:
            needed[place] = min(needed.get(place, len(uses)), times[-1])
    return tuple(reversed(times))


def _origin(view: IntermediateView, edges: dict[Place, tuple[Any, int]]) -> Place:
    """What gets the gradient of a view: what it is made of, or, where its history was made anew, the base of that."""
    place_of = {edge: place for place, edge in edges.items()}
    node = view.value.grad_fn
    while node is not None and node.next_functions:
        edge = node.next_functions[0]
        if edge in place_of:
            return place_of[edge]
        node = edge[0]
    return view.base


@dataclass(frozen=True)
class Contribution:
    """What one node of the autograd graph outside adds to the gradient of a tensor.

    Attributes:
        place: where the use that it stands for is in the order of the forward.
        node: when the node is made: the engine runs first what was made last.
    """

    place: int
    node: int


def accumulated_too_early(given: list[Contribution]) -> list[tuple[int, int]]:
    """Contributions that the engine would add before their turn: it gets all of a node when that node runs.

    Such a contribution takes a way round, through a node of its own that is made right before another one.

    Args:
        given: contributions to one gradient, those of one node in the order of the backward.

    Returns:
        (which, made before which node), in the order in which the ways round are to be made.
    """
    late: list[tuple[int, int]] = []
    now = max((each.node for each in given), default=0)
    rounded = False
    for i in sorted(range(len(given)), key=lambda i: -given[i].place):
        if given[i].node > now or (given[i].node == now and rounded):
            late.append((i, now))
            rounded = True
        elif given[i].node < now:
            now, rounded = given[i].node, False
    return late[::-1]


def order_contributions(
    stages: list[Grads],
    uses: list[dict[Place, Uses]],
    views: tuple[IntermediateView, ...],
    edges: dict[Place, tuple[Any, int]],
    ready: tuple[int, ...],
) -> tuple[list[Grads], tuple[tuple[Place, Point], ...]]:
    """Gradients that stages hand over use by use, as others may be added to them outside.

    Args:
        stages: the gradients of each, whole.
        uses: what they are made of, stage by stage.
        views: those that are made between the stages.
        edges: what leads to each place in the autograd graph.
        ready: for each view, the stage before which it is made.

    Returns:
        The gradients of each stage, and the detours that some of them take: what gets them, made before what.
    """
    points: list[Point] = []
    for k in range(len(stages) + 1):
        points += [("view", i) for i, made in enumerate(ready) if made == k]
        points += [("stage", k)] if k < len(stages) else []
    node_of = {point: number for number, point in enumerate(points)}
    given: dict[Place, list[Contribution]] = {}
    found: list[list[tuple[Place, torch.Tensor]]] = [[] for _ in stages]
    handed: dict[Place, list[tuple[int, int] | None]] = {}  # stage and position in it, of what is no view
    for k, stage in enumerate(stages):
        for place, accumulated in stage:
            used = uses[k][place]
            parts = list(zip(used.grads, used.places, strict=True))
            for grad, use in parts if one_by_one(used.grads, accumulated) else [(accumulated, used.last)]:
                given.setdefault(place, []).append(Contribution(use, node_of["stage", k]))
                handed.setdefault(place, []).append((k, len(found[k])))
                found[k].append((place, grad))
    for i, view in enumerate(views):
        base = _origin(view, edges)
        use = first_use(view.value, edges[base]) if base in edges else -1
        if base in given and use >= 0:
            given[base].append(Contribution(use, node_of["view", i]))
            handed[base].append(None)
    ordering_nodes: list[tuple[Place, Point]] = []
    for place, contributed in given.items():
        for which, before in accumulated_too_early(contributed):
            origin = handed[place][which]
            if origin is not None:
                k, position = origin
                found[k][position] = (("detour", len(ordering_nodes)), found[k][position][1])
                ordering_nodes.append((place, points[before]))
    return [tuple(grads) for grads in found], tuple(ordering_nodes)
