"""Functional collectives of a graph: every process must issue the same ones in the same order."""

from __future__ import annotations

from torch import fx

from sidefx_train import torch_compat as compat


def communicates(graph: fx.Graph) -> bool:
    """Returns True if a graph contains collectives."""
    return any(compat.is_collective(node.target) for node in graph.nodes)


def issued(graph: fx.Graph) -> list[tuple[str, ...]]:
    """Returns name, sizes and other arguments of the collectives that a graph issues, in order."""
    return [
        (name, *(str(arg.meta["val"].shape if isinstance(arg, fx.Node) else arg) for arg in node.args))
        for node in graph.nodes
        if compat.is_collective(node.target) and (name := compat.collective_name(node.target))
    ]
