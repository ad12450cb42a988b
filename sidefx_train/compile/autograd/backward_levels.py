"""Splits a backward into levels at the outputs that others were computed from; each level becomes one stage or more."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from sidefx_train.compile.autograd.shared_intermediates import Hidden
from sidefx_train.compile.graph.view_chains import gradient_edge, gradient_edges_behind
from sidefx_train.compile.residual.native_functions import Place

Level = tuple[tuple[Place, ...], tuple[Place, ...]]
"""Results, and the outputs that they were computed from."""


def levels_of(fakes: dict[Place, Any], inputs: set[tuple[Any, int]]) -> tuple[list[Level], dict[Place, int]]:
    """Returns the results, level by level, each with the outputs it was computed from; and the level of each view."""
    place_of = {gradient_edge(fake): place for place, fake in fakes.items()}
    behind = {
        place: {place_of[edge] for edge in gradient_edges_behind(fake) if edge in place_of} - {place}
        for place, fake in fakes.items()
    }
    levels: list[Level] = []
    ready: dict[Place, int] = {}
    waiting = list(fakes)
    while waiting:
        now = tuple(place for place in waiting if not behind[place] & set(waiting))
        views = [place for place in now if place[0] == "view"]
        if views:  # they need no stage of their own
            ready |= dict.fromkeys(views, len(levels))
        else:
            for unordered in _unconnected([(place, fakes[place]) for place in now], inputs | set(place_of)):
                levels.append((unordered, tuple(sorted(set().union(*(behind[place] for place in unordered))))))
        waiting = [place for place in waiting if place not in (views or now)]
    return levels, ready


def _unconnected(results: list[tuple[Place, Any]], ends: set[tuple[Any, int]]) -> list[tuple[Place, ...]]:
    """Groups results by the autograd graphs they share, up to ``ends``, in the order in which those were begun."""
    groups: list[tuple[list[Place], set[Any], int]] = []
    for place, fake in results:
        nodes, waiting, last = set[Any](), [fake.grad_fn], -1
        while waiting:
            node = waiting.pop()
            if node is None or node in nodes:
                continue
            nodes.add(node)
            within = [edge for edge in node.next_functions if edge not in ends and not hasattr(edge[0], "variable")]
            if len(within) < len(node.next_functions):
                last = max(last, node._sequence_nr())
            waiting += [following for following, _ in within]
        places = [place]
        for other in [other for other in groups if other[1] & nodes]:
            groups.remove(other)
            places, nodes, last = other[0] + places, other[1] | nodes, max(last, other[2])
        groups.append((places, nodes, last))
    return [tuple(sorted(places)) for places, _, last in sorted(groups, key=lambda group: group[2])]


def in_one_order(
    level: Level,
    fakes: dict[Place, Any],
    heard: set[tuple[Any, int]],
    ends: set[tuple[Any, int]],
) -> list[Level]:
    """Splits the results of a level if some lead to an observable target, such as hooks, to which others do not.

    The engine continues from a node to all its successors, even without a gradient: their hooks are called.
    """
    results, earlier = level
    stops: dict[tuple[Any, int], Place] = {
        edge: ("input", i) for i, edge in enumerate(ends | {gradient_edge(fakes[place]) for place in earlier})
    }
    reach = reach_of([fakes[place] for place in results], stops)
    uneven = any(len(reach[place]) not in (0, len(results)) for edge, place in stops.items() if edge in heard)
    return [((result,), earlier) for result in results] if uneven else [level]


def reach_of(
    roots: list[torch.Tensor | Hidden], grad_inputs: dict[tuple[Any, int], Place]
) -> dict[Place, frozenset[int]]:
    """Returns the roots that lead to each gradient input without passing another."""
    found: dict[Place, set[int]] = {place: set() for place in grad_inputs.values()}
    for i, root in enumerate(roots):
        seen, waiting = set[Any](), [root.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for edge in node.next_functions:
                if edge in grad_inputs:
                    found[grad_inputs[edge]].add(i)
                else:
                    waiting.append(edge[0])
    return {place: frozenset(numbers) for place, numbers in found.items()}


def edge_of(value: torch.Tensor | Hidden) -> Any:
    return value.edge if isinstance(value, Hidden) else get_gradient_edge(value)
