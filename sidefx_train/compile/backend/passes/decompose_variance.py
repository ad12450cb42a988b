"""Decomposes mean and variance into sums.

Inductor stores a mean separately between two sums. That small loop runs over other sizes than the sums and their users,
which prevents one fused loop over the rows: a matrix is then read from memory for each. As sums and arithmetic they are
one loop, whose rows stay in the nearest cache; sums over rows can also be blocked.

A sum of float32 is rounded after each addition: of equal numbers the mean may be off by 1e-5 of them, which a norm with
an epsilon of 1e-5 multiplies by 300. The differences from the first mean are summed too, which corrects both results.
If a number is infinite, its row has an undefined mean, and not an infinite one.
"""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import Any

import torch
from torch import fx

from sidefx_train.compile.graph.fx_utils import emit

aten = torch.ops.aten
_VARIANCES = (aten.var.correction, aten.var_mean.correction)
_TYPES = (torch.float32, torch.float64)
"""dtypes that are decomposed; for narrower ones Inductor accumulates in float32."""


def decompose_variances(module: fx.GraphModule, fake_mode: Any) -> None:
    """Rewrites variances of static size as the mean square of the differences from the mean, and corrects the mean."""
    found = [(n, dims) for n in module.graph.nodes if n.target in _VARIANCES and (dims := _dims(n)) is not None]
    for node, dims in found:
        _write_out(module.graph, node, dims, fake_mode)
    if found:
        module.graph.lint()
        module.recompile()


def _dims(node: fx.Node) -> list[int] | None:
    """Returns the reduced dimensions of a variance; ``None`` if it is not decomposed."""
    given = node.args[0]
    value = given.meta.get("val") if isinstance(given, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.dtype not in _TYPES:
        return None
    if node.target is aten.var_mean.correction and not all(user.target is operator.getitem for user in node.users):
        return None
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    chosen = [dim % value.dim() for dim in dims] if dims else list(range(value.dim()))  # type: ignore[union-attr]
    if not all(isinstance(value.shape[dim], int) for dim in chosen):
        return None
    count = math.prod(value.shape[dim] for dim in chosen)
    return chosen if chosen and count > 0 and count - _correction(node) > 0 else None


def _correction(node: fx.Node) -> Any:
    given = node.kwargs.get("correction")
    return 1 if given is None else given


def _write_out(graph: fx.Graph, node: fx.Node, dims: list[int], fake_mode: Any) -> None:
    given, kept = node.args[0], bool(node.kwargs.get("keepdim", False))
    count = math.prod(given.meta["val"].shape[dim] for dim in dims)  # type: ignore[union-attr]
    call = partial(emit, graph, fake_mode)

    def replace(used: fx.Node, value: fx.Node) -> None:
        used.replace_all_uses_with(value if kept else call(aten.squeeze.dims, value, dims))

    with graph.inserting_before(node):
        first = call(aten.div.Tensor, call(aten.sum.dim_IntList, given, dims, True), count)
        distance = call(aten.sub.Tensor, given, first)
        squares = call(aten.sum.dim_IntList, call(aten.mul.Tensor, distance, distance), dims, True)
        rest = call(aten.div.Tensor, call(aten.sum.dim_IntList, distance, dims, True), count)
        mean = call(aten.add.Tensor, first, rest)
        excess = call(aten.mul.Tensor, call(aten.mul.Tensor, rest, rest), count)
        squares = call(aten.clamp_min.default, call(aten.sub.Tensor, squares, excess), 0)
        variance = call(aten.div.Tensor, squares, count - _correction(node))
        if node.target is aten.var.correction:
            replace(node, variance)
        for get in list(node.users):  # of the pair of results
            replace(get, (variance, mean)[get.args[1]])  # type: ignore[index]
            graph.erase_node(get)
    graph.erase_node(node)
