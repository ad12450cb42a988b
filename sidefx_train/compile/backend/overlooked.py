"""What Inductor overlooks in an operator's arguments, written so that it cannot.

- Its patterns pay no regard to arguments by name that they do not mention: ``add(x, mm(a, b), alpha=2)`` became
  ``addmm(x, a, b)``, and the running sum of ones had the type of the ones, whatever ``dtype`` asked for.
- The C functions by which its C++ calls torch take every number as a double: ``2 ** integers`` was computed in floating
  point and then taken for integers, in half the memory.

``torch.compile`` does the same. What is written instead is what its lowering makes of the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from sidefx_train.compile.graphs import emit

aten = torch.ops.aten
_SUMS = (aten.add.Tensor, aten.sub.Tensor)


def write_out_overlooked(module: fx.GraphModule, fake_mode: Any) -> None:
    """Rewrites sums with an ``alpha``, running sums with a ``dtype``, and integer powers of a number."""
    graph, found = module.graph, False
    for node in list(graph.nodes):
        if node.target in _SUMS and "alpha" in node.kwargs and _is_of_the_sums_type(node):
            _write_out_multiple(graph, node, fake_mode)
        elif node.target is aten.cumsum.default and "dtype" in node.kwargs and _is_full(node.args[0]):
            _hide_from_pattern(graph, node, fake_mode)
        elif node.target is aten.pow.Scalar and not node.meta["val"].dtype.is_floating_point:
            _write_out_base(graph, node, fake_mode)
        else:
            continue
        found = True
    if found:
        graph.lint()
        module.recompile()


def _is_of_the_sums_type(node: fx.Node) -> bool:
    """True where the multiple is what the sum is computed in; no pattern takes the others, which are promoted first."""
    added, alpha = (n.meta["val"] if isinstance(n, fx.Node) else n for n in (node.args[1], node.kwargs["alpha"]))
    if not isinstance(added, torch.Tensor):
        return True
    return bool(added.dtype == node.meta["val"].dtype == torch.result_type(added, alpha))


def _write_out_multiple(graph: fx.Graph, node: fx.Node, fake_mode: Any) -> None:
    added, alpha = node.args[1], node.kwargs["alpha"]
    with graph.inserting_before(node):
        product = emit(graph, fake_mode, aten.mul.Tensor, added, alpha) if isinstance(added, fx.Node) else added * alpha
    node.args, node.kwargs = (node.args[0], product), {}


def _is_full(given: Any) -> bool:
    return isinstance(given, fx.Node) and given.target is aten.full.default


def _hide_from_pattern(graph: fx.Graph, node: fx.Node, fake_mode: Any) -> None:
    """The pattern wants ``pin_memory=False`` to be said of the tensor that is added up."""
    given = node.args[0]
    options = {name: value for name, value in given.kwargs.items() if name != "pin_memory"}  # type: ignore[union-attr]
    with graph.inserting_before(node):
        unsaid = emit(graph, fake_mode, aten.full.default, *given.args, **options)  # type: ignore[union-attr]
    node.args = (unsaid, *node.args[1:])


def _write_out_base(graph: fx.Graph, node: fx.Node, fake_mode: Any) -> None:
    base, power = node.args
    value = node.meta["val"]
    with graph.inserting_before(node):
        number = emit(graph, fake_mode, aten.full.default, [], base, dtype=value.dtype, device=value.device)
    node.target, node.args = aten.pow.Tensor_Tensor, (number, power)
