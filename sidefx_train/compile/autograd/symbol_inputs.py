"""Sizes that a backward needs as inputs of their own, because its tensors show them only in sums or products.

Inductor reads a symbol of a size from an input whose size it is. A saved tensor with ``u0 + u1`` rows, joined from
two selections, shows neither of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from sidefx_train import torch_compat as compat


def symbol_nodes(graph: fx.Graph, forward: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the forward's nodes of the symbols that a backward cannot read from its inputs.

    Args:
        graph: gets new nodes, at its end, for symbols that are the size of a tensor only.
        forward: nodes of the forward.
        inputs: nodes that become inputs of the backward.
    """
    found: list[fx.Node] = []
    unbound = compat.unbound_symbols(node.meta.get("val") for node in inputs)
    for symbol in sorted(unbound, key=str):
        node = next((node for node in forward if _is(node.meta.get("val"), symbol)), None)
        node = _size(graph, forward, symbol) if node is None else node
        if node is not None:
            found.append(node)
    return found


def _is(value: object, symbol: object) -> bool:
    return isinstance(value, torch.SymInt) and compat.symbol_of(value) == symbol


def _size(graph: fx.Graph, forward: Sequence[fx.Node], symbol: object) -> fx.Node | None:
    """Returns a new node that reads a symbol from a tensor's size."""
    for node in forward:
        value = node.meta.get("val")
        dimension = compat.dimension_of(value, symbol)
        if dimension is not None and isinstance(value, torch.Tensor):
            last = next(iter(reversed(graph.nodes)))
            with graph.inserting_before(last) if last.op == "output" else graph.inserting_after(last):
                made = graph.call_function(torch.ops.aten.sym_size.int, (node, dimension))
            made.meta["val"] = value.shape[dimension]
            return made
    return None
