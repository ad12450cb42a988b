"""Results of a graph run operation by operation, with the version counters that eager's results have."""

from __future__ import annotations

from typing import Any

from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.artifacts import OWN


def own_versions(graph: fx.Graph) -> dict[int, int]:
    """Returns the version counters of results that are written in the graph, by position."""
    (returned,) = next(iter(reversed(graph.nodes))).args
    return {i: n.meta[OWN] for i, n in enumerate(returned) if isinstance(n, fx.Node) and OWN in n.meta}  # type: ignore[arg-type, misc]


def set_own_versions(results: list[Any], versions: dict[int, int]) -> None:
    """Removes the view relation of results that kernels have written to, and sets their version counters."""
    for i, version in versions.items():
        results[i] = compat.without_view_relation(results[i])
        compat.set_version(results[i], version)
