"""Accumulation order: the engine runs the newest nodes first and adds gradients in the order in which they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from sidefx_train.compile.autograd.gradient_contributions import Uses, first_use, one_by_one
from sidefx_train.compile.residual.native_functions import Place
from sidefx_train.compile.residual.view_replay import IntermediateView

Point = tuple[Literal["stage", "view"], int]
"""What creates an autograd node outside."""

Grads = tuple[tuple[Place, torch.Tensor], ...]


def times(
    views: tuple[IntermediateView, ...],
    edges: dict[Place, tuple[Any, int]],
    ready: dict[Place, int],
    uses: list[dict[Place, Uses]],
) -> tuple[int, ...]:
    """Returns the stage before which each view is made: the engine runs the newest nodes first."""
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
    """Returns what gets the gradient of a view: its base or, if its history was regenerated, the base of that."""
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
    """One gradient contribution of a node in the outside autograd graph.

    Attributes:
        place: position of the use in the forward.
        node: position of the node's creation: the engine runs the newest first.
    """

    place: int
    node: int


def accumulated_too_early(given: list[Contribution]) -> list[tuple[int, int]]:
    """Returns contributions that the engine would accumulate too early: it gets all of a node's when that node runs.

    Such a contribution passes through an ordering node, created right before another node.

    Args:
        given: contributions to one gradient; those of one node in backward order.

    Returns:
        (index, node before which the ordering node is created), in creation order.
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
    natives: list[bool],
) -> tuple[list[Grads], tuple[tuple[Place, Point], ...]]:
    """Splits the gradients of stages by use, so that outside contributions are accumulated in between.

    Args:
        stages: the complete gradients of each stage.
        uses: the contributions to them, by stage.
        views: views that are made between the stages.
        edges: gradient edge of each location.
        ready: for each view, the stage before which it is made.
        natives: for each stage, whether it is a custom function's own node.

    Returns:
        The gradients of each stage, and the ordering nodes of some of them: (target, created before what).
    """
    points: list[Point] = []
    for k in range(len(stages) + 1):
        points += [("view", i) for i, made in enumerate(ready) if made == k]
        points += [("stage", k)] if k < len(stages) else []
    node_of = {point: number for number, point in enumerate(points)}
    given: dict[Place, list[Contribution]] = {}
    found: list[list[tuple[Place, torch.Tensor]]] = [[] for _ in stages]
    handed: dict[Place, list[tuple[int, int] | None]] = {}  # (stage, position in it); None for a view
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
    for k in (k for k, native in enumerate(natives) if native):
        for place, used in uses[k].items():
            if place in given:
                given[place].append(Contribution(used.last, node_of["stage", k]))
                handed[place].append(None)
    ordering_nodes: list[tuple[Place, Point]] = []
    for place, contributed in given.items():
        for which, before in accumulated_too_early(contributed):
            origin = handed[place][which]
            if origin is not None:
                k, position = origin
                found[k][position] = (("ordering", len(ordering_nodes)), found[k][position][1])
                ordering_nodes.append((place, points[before]))
    return [tuple(grads) for grads in found], tuple(ordering_nodes)
