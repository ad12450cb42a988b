"""Operators that torch calls on a GPU where it calls another one on the CPU.

Graphs captured on the CPU contain the one, the code for a GPU the other. So that the code can run without a GPU, the
operators of the GPU are computed by those of the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_LOGSUMEXP_ROWS = 32
"""The efficient attention of CUDA pads the rows of its sums to a multiple of this."""

_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default


def _attention(node: fx.Node) -> list[fx.Node]:
    kwargs = dict(node.kwargs)
    node.target = _EFFICIENT
    node.args = (*node.args[:3], kwargs.pop("attn_mask", None), True, *node.args[3:])
    node.kwargs = kwargs
    return []


def _attention_backward(node: fx.Node) -> list[fx.Node]:
    grad, query, key, value, out, sums, dropout, causal = node.args
    kwargs = dict(node.kwargs)
    forward = sums
    while forward.target is not _EFFICIENT:  # type: ignore[union-attr]
        forward = forward.args[0]  # type: ignore[union-attr, assignment]
    with node.graph.inserting_before(node):
        seeds = [node.graph.call_function(operator.getitem, (forward, i)) for i in (2, 3)]
    node.target = _EFFICIENT_BACKWARD
    mask = kwargs.pop("attn_mask", None)
    wanted = [True, True, True, False]
    node.args = (grad, query, key, value, mask, out, sums, *seeds, dropout, wanted, causal)
    node.kwargs = kwargs
    return seeds


DEVICE_OPERATORS: dict[Any, Callable[[fx.Node], list[fx.Node]]] = {
    _FORWARD: _attention,
    _BACKWARD: _attention_backward,
}
"""Operator of the CPU -> changes a node that calls it to what a GPU runs; returns nodes that it inserts before it."""

CPU_ONLY = ("aten::mkldnn_", "mkldnn::", "onednn::", "quantized::")
"""Beginnings of the names of operators that a GPU lacks; a program takes others if oneDNN is switched off."""


def _padded(sums: torch.Tensor) -> torch.Tensor:
    rows = -(-sums.shape[2] // _LOGSUMEXP_ROWS) * _LOGSUMEXP_ROWS
    padded = sums.new_full((*sums.shape[:2], rows), float("inf"))
    padded[:, :, : sums.shape[2]] = sums
    return padded


def _heads_inside(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with its heads between rows and elements in memory, as kernels of a GPU leave it."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    out, sums = _FORWARD(query, key, value, dropout_p, is_causal, attn_mask=attn_bias, scale=scale)
    seed = torch.zeros((), dtype=torch.int64)
    return _heads_inside(out), _padded(sums), seed, seed.clone()


def _efficient_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    sums = logsumexp[:, :, : query.shape[2]].transpose(1, 2).contiguous().transpose(1, 2)
    grads = _BACKWARD(grad, query, key, value, out, sums, dropout_p, is_causal, attn_mask=attn_bias, scale=scale)
    return (*map(_heads_inside, grads), None)


CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
"""Operators of a GPU, by name, and what computes them on CPU tensors."""
