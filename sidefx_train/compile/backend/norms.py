"""Layer norms of large matrices, kept whole where nothing around them would be fused with their loops.

Taken apart, a layer norm is a loop over the rows, and one more over blocks of rows for the gradients of weight and
bias. What is done elementwise to its arguments and results (a residual that is added, an activation) costs these loops
nothing, and of a matrix that is in the cache they are faster than torch's kernels. Those read the matrix once less: of
one larger than the cache, with nothing but matrix products around it, they are faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import getitem
from typing import Any

import torch
from torch import fx

from sidefx_train import _torch_compat as compat

aten = torch.ops.aten

_FEWEST = 3 << 19
"""Numbers of a matrix that is larger than the cache."""

_library = torch.library.Library("sidefx", "FRAGMENT")
_library.define(
    "layer_norm(Tensor input, Tensor? weight, Tensor? bias, int dims, float eps) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "layer_norm_backward(Tensor grad, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, int dims,"
    " bool for_input, bool for_weight, bool for_bias) -> (Tensor, Tensor, Tensor)"
)
"""Torch's operators with nothing but tensors and numbers as arguments, which C++ around a graph's kernels can give."""


def _layer_norm(x: Any, weight: Any, bias: Any, dims: int, eps: float) -> tuple[torch.Tensor, ...]:
    return tuple(aten.native_layer_norm.default(x, x.shape[x.dim() - dims :], weight, bias, eps))


def _layer_norm_backward(grad: Any, x: Any, mean: Any, rstd: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    weight, bias, dims, *wanted = rest
    shape = x.shape[x.dim() - dims :]
    made = aten.native_layer_norm_backward.default(grad, x, shape, mean, rstd, weight, bias, wanted)
    return tuple(x.new_empty(0) if each is None else each for each in made)


for _name, _kernel in (("layer_norm", _layer_norm), ("layer_norm_backward", _layer_norm_backward)):
    _library.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"sidefx::{_name}", _kernel, lib=_library)


def _forward_whole(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    return torch.ops.sidefx.layer_norm.default(x, weight, bias, len(shape), eps)


def _backward_whole(grad: Any, x: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, wanted: Any) -> Any:
    made = torch.ops.sidefx.layer_norm_backward.default(grad, x, mean, rstd, weight, bias, len(shape), *wanted)
    return tuple(each if asked else None for each, asked in zip(made, wanted, strict=True))


_WHOLE: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: _forward_whole,
    aten.native_layer_norm_backward.default: _backward_whole,
}

_PRODUCTS = frozenset((aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward))
_VIEWS = frozenset((aten.view, aten._unsafe_view, aten.t, aten.transpose, aten.permute, aten.detach, aten.alias))


def whole_norms(graph: fx.Graph) -> dict[fx.Node, Callable[..., Any]]:
    """Layer norms of a captured graph that stay whole, forward and backward, and what stands for each."""
    if not compat.calls_dispatcher():
        return {}
    found = [n for n in graph.nodes if n.op == "call_function" and n.target in _WHOLE and _is_large(n)]
    return {node: _WHOLE[node.target] for node in found if _is_alone(node)}


def _is_large(node: fx.Node) -> bool:
    value = node.args[0].meta.get("val")  # type: ignore[union-attr]
    if value.dtype != torch.float32 or value.device.type != "cpu":
        return False
    return all(isinstance(size, int) for size in value.shape) and math.prod(value.shape) >= _FEWEST


def _is_alone(node: fx.Node) -> bool:
    """True if what it takes comes from matrix products or from outside, and what it gives goes there."""
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
