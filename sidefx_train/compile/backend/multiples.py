"""Sums with a multiple of a tensor (``alpha``) written as a product and a sum.

Inductor's patterns for sums ask for two arguments and pay no regard to a third by name: ``add(x, mm(a, b), alpha=2)``
became ``addmm(x, a, b)``, as in ``torch.compile``. Its lowering makes the same product and sum of the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from sidefx_train.compile.graphs import emit

aten = torch.ops.aten
_SUMS = (aten.add.Tensor, aten.sub.Tensor)


def write_out_multiples(module: fx.GraphModule, fake_mode: Any) -> None:
    """Rewrites every sum with an ``alpha``."""
    found = [n for n in module.graph.nodes if n.target in _SUMS and "alpha" in n.kwargs and _is_of_the_sums_type(n)]
    for node in found:
        _write_out(module.graph, node, fake_mode)
    if found:
        module.graph.lint()
        module.recompile()


def _is_of_the_sums_type(node: fx.Node) -> bool:
    """True where the multiple is what the sum is computed in; no pattern takes the others, which are promoted first."""
    added, alpha = (n.meta["val"] if isinstance(n, fx.Node) else n for n in (node.args[1], node.kwargs["alpha"]))
    if not isinstance(added, torch.Tensor):
        return True
    return bool(added.dtype == node.meta["val"].dtype == torch.result_type(added, alpha))


def _write_out(graph: fx.Graph, node: fx.Node, fake_mode: Any) -> None:
    added, alpha = node.args[1], node.kwargs["alpha"]
    with graph.inserting_before(node):
        product = emit(graph, fake_mode, aten.mul.Tensor, added, alpha) if isinstance(added, fx.Node) else added * alpha
    node.args, node.kwargs = (node.args[0], product), {}
