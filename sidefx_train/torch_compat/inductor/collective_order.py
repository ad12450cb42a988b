"""Collectives keep their number and order in Inductor: every process issues them as the program does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import fx

from sidefx_train.torch_compat.distributed.collectives import collective_name, is_collective
from sidefx_train.torch_compat.inductor.checks import WrongSchedule
from sidefx_train.torch_compat.inductor.patching import replaced

_NUMBER = "sidefx_collective"
"""Entry of a node's ``meta``: position of a collective, or of a wait, in the program."""


@contextmanager
def distinct_collectives(graph: fx.Graph) -> Iterator[None]:
    """Context in which no two collectives of a graph have equal arguments: torch's CSE would merge them.

    Numbers them, too, for :func:`collectives_in_order`.
    """
    nodes = [node for node in graph.nodes if is_collective(node.target)]
    before = [node.args for node in nodes]
    for number, node in enumerate(nodes):
        node.meta[_NUMBER] = number
        if isinstance(node.args[-1], str):
            node.args = (*node.args[:-1], f"{node.args[-1]}#{number}")
    try:
        yield
    finally:
        for node, args in zip(nodes, before, strict=True):
            node.args = args


def restore_groups(graph: fx.Graph) -> None:
    """Restores the arguments in a copy of a graph that was made in :func:`distinct_collectives`."""
    for node in graph.nodes:
        if is_collective(node.target) and isinstance(node.args[-1], str):
            node.args = (*node.args[:-1], node.args[-1].rpartition("#")[0])


@contextmanager
def collectives_in_order(graph: fx.Graph) -> Iterator[None]:
    """Context around the lowering of a graph in which the order of its collectives is checked.

    Raises:
        WrongSchedule: from inside, if collectives were dropped, merged or reordered.
    """
    from torch._inductor import scheduler

    def scheduled(before: Callable[..., Any]) -> Callable[..., Any]:
        def codegen(plan: Any) -> Any:
            _check(plan, graph)
            return before(plan)

        return codegen

    started = [_number(node) for node in graph.nodes if is_collective(node.target) and collective_name(node.target)]
    if started != sorted(started):
        raise WrongSchedule(f"Inductor's passes reorder the collectives of a graph as {started}")
    with replaced(scheduler.Scheduler, "codegen", scheduled) if started else nullcontext():
        yield


def _number(node: fx.Node) -> int:
    return int(node.meta.get(_NUMBER, -1))


def _check(plan: Any, graph: fx.Graph) -> None:
    """Compares the operations of a schedule with the collectives and waits of the graph that is lowered."""
    from torch._inductor import ir

    parts = [part for kernel in plan.nodes for part in kernel.get_nodes()]
    nodes = [
        node
        for part in parts
        if isinstance(part.node, (ir._CollectiveKernel, ir.FallbackKernel))
        for node in part.node.origins
        if is_collective(node.target)
    ]
    found = [_number(node) for node in nodes]
    started = [_number(node) for node in nodes if collective_name(node.target)]
    expected = [_number(node) for node in graph.nodes if is_collective(node.target)]
    if sorted(found) != sorted(expected) or started != sorted(started):
        raise WrongSchedule(f"Inductor schedules the collectives {expected} of a graph as {found}")
