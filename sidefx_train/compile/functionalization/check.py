"""Invariants of a functional graph."""

from __future__ import annotations

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.artifacts import FunctionalGraph
from sidefx_train.compile.graph.fx_utils import written_args
from sidefx_train.compile.graph.validation import around
from sidefx_train.errors import BackendError


def check_functional(graph: FunctionalGraph) -> None:
    """Every placeholder is fed, nothing is written except by trailing ``copy_`` into placeholders.

    Raises:
        BackendError: the graph breaks an invariant; the nodes around the offender are in the message.
    """
    nodes = list(graph.module.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    if [str(n.target) for n in placeholders] != list(graph.feeds):
        raise BackendError("SFX204", f"placeholders {placeholders} are not the feeds {graph.feeds}")
    trailing = False
    for i, node in enumerate(nodes):
        written = written_args(node)
        if not written:
            if trailing and node.op == "call_function" and isinstance(node.target, compat.OpOverload):
                raise BackendError("SFX204", f"an operation follows the input updates:\n{around(nodes, i)}")
            continue
        name = str(node.target)
        if name != "aten.copy_.default" or written[0].op != "placeholder":
            raise BackendError("SFX204", f"{name} is left in the functional graph:\n{around(nodes, i)}")
        trailing = True
