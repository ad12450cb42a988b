"""Keeps composite operators whole if torch's kernels are faster than the loops of their decomposition.

Windows of an image or a sequence, and reversed dimensions, cost index arithmetic for every number in generated loops.

Complex numbers have no loops: each part of an operator on them would be a call.

Layer norms of large matrices are kept if no neighbor would be fused with their loops. Decomposed, one is a loop over
the rows, and another over blocks of rows for the gradients of weight and bias. Elementwise operations on its arguments
and results (a residual sum, an activation) cost these loops nothing, and for a matrix in the cache they are faster than
torch's kernels. The kernels read the matrix once less: for one larger than the cache, between matrix products, they are
faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.fx_utils import emit
from sidefx_train.compile.ops.registration import define_operator

aten = torch.ops.aten

_FEWEST = 3 << 19
"""Elements of a matrix that is larger than the cache."""

_FEWEST_WINDOWS = 1 << 12
"""Elements from which a call through torch's dispatcher is worth it."""


def _zeros_around(x: torch.Tensor, widths: list[int]) -> torch.Tensor:
    return aten.constant_pad_nd.default(x, widths, 0)


define_operator("zeros_around(Tensor input, int[] widths) -> Tensor", _zeros_around, _zeros_around)
"""Padding with zeros, without a number as an argument: C++ around a graph's kernels cannot give one."""

_NORMS = (aten.native_layer_norm.default, aten.native_layer_norm_backward.default)

_PRODUCTS = frozenset((aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward))
_VIEWS = frozenset((aten.view, aten._unsafe_view, aten.t, aten.transpose, aten.permute, aten.detach, aten.alias))

_WINDOWS = frozenset(op.default for op in (aten.im2col, aten.col2im, aten.unfold_backward, aten.grid_sampler_2d))
_REVERSING = {aten.flip.default: 1, aten.roll.default: 2}
"""Position of the dimensions among their arguments."""

_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)


def kept_composite_ops(graph: fx.Graph, decompositions: dict[Any, Any]) -> dict[fx.Node, Callable[..., Any]]:
    """Returns nodes of a captured graph that are kept whole, with the replacement of each operation.

    Args:
        graph: a captured graph.
        decompositions: decompositions applied while the graph is made functional.
    """
    if not compat.calls_dispatcher():
        return {}
    found = [node for node in graph.nodes if node.op == "call_function" and _is_kept(node)]
    for node in found:
        compat.call_composite(node.target)
    return {node: partial(_as_it_is, node.target, decompositions) for node in found}


def _is_kept(node: fx.Node) -> bool:
    if node.target in _NORMS:
        return _is_large(node, _FEWEST) and _is_alone(node)
    return _is_moved_by_number(node) or _is_complex_sign(node)


def _is_moved_by_number(node: fx.Node) -> bool:
    """Returns True for windows of a large tensor, and for one reversed or rolled along a contiguous dimension."""
    if node.target in _REVERSING and _is_large(node, _FEWEST_WINDOWS):
        value, dims = node.args[0].meta["val"], node.args[_REVERSING[node.target] :]  # type: ignore[union-attr]
        if not dims or not dims[0]:  # a roll of the flattened tensor
            return node.target is aten.roll.default
        return any(value.stride(dim) == 1 and value.shape[dim] > 1 for dim in dims[0])  # type: ignore[union-attr]
    return node.target in _WINDOWS and _is_large(node, _FEWEST_WINDOWS)


def _is_complex_sign(node: fx.Node) -> bool:
    """Returns True for the factor in the derivative of an absolute value."""
    return node.target is aten.sgn.default and node.meta["val"].is_complex() and node.meta["val"].device.type == "cpu"


def _as_it_is(target: Any, decompositions: dict[Any, Any], *args: Any, **kwargs: Any) -> Any:
    decomposition = decompositions.pop(target, None)
    try:
        return target(*args, **kwargs)
    finally:
        if decomposition is not None:
            decompositions[target] = decomposition


def _is_large(node: fx.Node, fewest: int) -> bool:
    value = node.args[0].meta.get("val")  # type: ignore[union-attr]
    if value.dtype != torch.float32 or value.device.type != "cpu":
        return False
    return all(isinstance(size, int) for size in value.shape) and math.prod(value.shape) >= fewest


def _is_alone(node: fx.Node) -> bool:
    """Returns True if its inputs come from matrix products or from outside, and its results go there."""
    if not _is_far(_producer(node.args[0])):
        return False
    results = [user for user in node.users if user.target is getitem and user.args[1] == 0]
    return all(_is_far(user) for result in results for user in _consumers(result))


def _producer(given: Any) -> fx.Node:
    while _packet(given) in _VIEWS:
        given = given.args[0]
    return given  # type: ignore[no-any-return]


def _consumers(made: fx.Node) -> Iterator[fx.Node]:
    for user in made.users:
        if _packet(user) in _VIEWS:
            yield from _consumers(user)
        else:
            yield user


def _is_far(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or _packet(node) in _PRODUCTS


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def join_complex(module: fx.GraphModule, fake_mode: Any) -> None:
    """Simplifies writes of complex numbers into a part of others: fewer calls, each of which allocates a tensor."""
    changed = False
    for node in list(module.graph.nodes):
        if node.target is aten.copy.default and _is_put_in_place(node):
            node.replace_all_uses_with(node.args[1])
        elif node.target is aten.slice_scatter.default and node.meta["val"].is_complex():
            around = _padding(*node.args, **node.kwargs)
            if around is None:
                continue
            with module.graph.inserting_before(node):
                padded = emit(module.graph, fake_mode, torch.ops.sidefx.zeros_around.default, node.args[1], around)
            if _layout(padded) != _layout(node):
                module.graph.erase_node(padded)
                continue
            node.replace_all_uses_with(padded)
        else:
            continue
        module.graph.erase_node(node)
        changed = True
    if changed:
        module.graph.eliminate_dead_code()
        module.recompile()


def _layout(node: fx.Node) -> Any:
    value = node.meta["val"]
    return value.dtype, value.shape, value.stride(), value.device


def _is_put_in_place(node: fx.Node) -> bool:
    made, given = (each.meta["val"] for each in (node, node.args[1]))  # type: ignore[union-attr]
    same = (given.dtype, given.shape, given.device) == (made.dtype, made.shape, made.device)
    return made.is_complex() and same and all(user.target in _SCATTERS and user.args[1] is node for user in node.users)


def _padding(whole: Any, part: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """Returns the widths of the zeros around a part; ``None`` if something else is around it."""
    size, dims = whole.meta["val"].shape, whole.meta["val"].dim()
    if whole.target is not aten.full.default or whole.args[1] != 0 or step != 1:
        return None
    start, given = (start or 0), part.meta["val"].shape
    if not all(isinstance(n, int) for n in (*size, *given, start)) or start < 0:
        return None
    around = [0] * (2 * (dims - dim % dims))
    around[-2:] = [start, size[dim] - start - given[dim]]
    return around
