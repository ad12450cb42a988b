"""Operators of the native module's attention, and their substitution for torch's fused ones in a graph.

Queries, keys and values keep their memory layout. Results have the fused kernel's layout or, if the three gradients
were concatenated, are one tensor that the kernel writes in place.
"""

from __future__ import annotations

import math
import operator
import struct
from functools import partial
from typing import Any

import torch
from torch import fx

from sidefx_train.compile.graph.fx_utils import emit, erase_unused
from sidefx_train.compile.native import attention_module
from sidefx_train.compile.ops.registration import define_operator

aten = torch.ops.aten

NARROW = 2
"""Flag of the kernel's arguments: the numbers are bfloat16."""

_INPUTS = "Tensor q, Tensor k, Tensor v"
_BACKWARD_INPUTS = f"Tensor grad, {_INPUTS}, Tensor out, Tensor sums, bool causal, float scale"


def _empty(like: torch.Tensor, heads_last: bool) -> torch.Tensor:
    """Returns an empty [rows, heads, length, width], stored as [rows, length, heads, width] if ``heads_last``."""
    rows, heads, length, width = like.shape
    if heads_last:
        return like.new_empty(rows, length, heads, width).transpose(1, 2)
    return like.new_empty(rows, heads, length, width)


def _forward_fake(q: Any, k: Any, v: Any, causal: Any, scale: Any, heads_last: Any) -> Any:
    return _empty(q, heads_last & 1), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_fake(*args: Any) -> Any:
    return tuple(_empty(tensor, args[8] >> i & 1) for i, tensor in enumerate(args[1:4]))


def _joined_fake(*args: Any) -> Any:
    rows, heads, length, width = args[1].shape
    return args[1].new_empty(rows, length, 3 * heads * width)


def _forward(q: Any, k: Any, v: Any, causal: bool, scale: float, heads_last: int) -> Any:
    out, sums = made = _forward_fake(q, k, v, causal, scale, heads_last)
    _call(0, q, k, v, out, sums, (), causal, scale)
    return made


def _backward(*args: Any) -> Any:
    grad, q, k, v, out, sums, causal, scale, _ = args
    made = _backward_fake(*args)
    _call(1, q, k, v, out, sums, (grad, *made), causal, scale)
    return made


def _backward_joined(*args: Any) -> Any:
    grad, q, k, v, out, sums, causal, scale = args
    made = _joined_fake(*args)
    rows, heads, length, width = q.shape
    parts = made.view(rows, length, 3, heads, width).permute(2, 0, 3, 1, 4)
    _call(1, q, k, v, out, sums, (grad, *parts), causal, scale)
    return made


def _call(which: int, q: Any, k: Any, v: Any, out: Any, sums: Any, others: Any, causal: bool, scale: float) -> None:
    native = attention_module()
    assert native is not None, "graphs with this operator need the native module"
    rows, heads, length, width = q.shape
    how = int(causal) + NARROW * (q.dtype == torch.bfloat16)
    (bits,) = struct.unpack("=q", struct.pack("=d", scale))
    given = [n for t in (q, k, v, out) for n in _strided(t)]
    more = [n for t in others for n in _strided(t)]
    native.attend(which, rows, heads, length, k.shape[2], width, how, bits, *given, sums.data_ptr(), *more)


def _strided(tensor: torch.Tensor) -> list[int]:
    return [tensor.data_ptr(), *tensor.stride()]


define_operator(
    f"attention({_INPUTS}, bool causal, float scale, int heads_last) -> (Tensor, Tensor)", _forward, _forward_fake
)
define_operator(
    f"attention_backward({_BACKWARD_INPUTS}, int heads_last) -> (Tensor, Tensor, Tensor)", _backward, _backward_fake
)
define_operator(f"attention_backward_joined({_BACKWARD_INPUTS}) -> Tensor", _backward_joined, _joined_fake)


def attend(q: Any, k: Any, v: Any, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with the default scale; also returns the log-sum-exp for its derivative."""
    made, sums = _forward(q, k, v, causal, 1.0 / math.sqrt(q.shape[3]), 1)
    return made, sums


def attend_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, causal: bool) -> list[torch.Tensor]:
    """Returns the gradients of :func:`attend`'s arguments."""
    return list(_backward(grad, q, k, v, out, sums, causal, 1.0 / math.sqrt(q.shape[3]), 7))


# --- in a graph --------------------------------------------------------------------------------------------------


def write_into(node: fx.Node, fake_mode: Any, backward: bool, causal: bool) -> None:
    """Rewrites one fused attention, or its derivative, whose log-sum-exp has no other use."""
    graph = node.graph
    call = partial(emit, graph, fake_mode)
    taken = node.args[: 6 if backward else 3]
    q = taken[1 if backward else 0]
    scale = node.kwargs.get("scale")
    width = q.meta["val"].shape[-1]  # type: ignore[union-attr]
    how = (causal, float(scale) if scale is not None else 1.0 / math.sqrt(width))  # type: ignore[arg-type]
    joined = _joined(node) if backward else None
    with graph.inserting_before(node):
        if joined is not None:
            made = call(torch.ops.sidefx.attention_backward_joined.default, *taken, *how)
            joined.replace_all_uses_with(made)
            erase_unused(joined)
            return
        tensors = 3 if backward else 1
        heads_last = sum(_is_heads_last(node.meta["val"][i]) << i for i in range(tensors))
        op = torch.ops.sidefx.attention_backward if backward else torch.ops.sidefx.attention
        made = call(op.default, *taken, *how, heads_last)
        for get in list(node.users):
            get.replace_all_uses_with(call(operator.getitem, made, get.args[1]))
            graph.erase_node(get)
    graph.erase_node(node)


def _is_heads_last(like: torch.Tensor) -> bool:
    return not like.is_contiguous()


def _joined(node: fx.Node) -> fx.Node | None:
    """Returns the node that concatenates the three gradients, each [rows, length, heads * width], if nothing else uses
    them."""
    rows, heads, length, width = node.meta["val"][0].shape
    if any(like.shape != (rows, heads, length, width) for like in node.meta["val"]) or len(node.users) != 3:
        return None
    parts: dict[Any, fx.Node] = {}
    for get in node.users:
        last, rounds = get, 0
        while len(last.users) == 1 and (after := next(iter(last.users))).target is not aten.cat.default:
            if not _moves(after, [rows, length, heads, width], [rows, length, heads * width]):
                return None
            last, rounds = after, rounds + (after.target in _TRANSPOSES)
        if rounds != 1:  # with as many heads as positions, shapes are ambiguous
            return None
        if len(last.users) != 1 or list(last.meta["val"].shape) != [rows, length, heads * width]:
            return None
        parts[get.args[1]] = last
    readers = {next(iter(last.users)) for last in parts.values()}
    if len(readers) != 1 or len(parts) != 3:
        return None
    (reader,) = readers
    dim = reader.args[1] if len(reader.args) > 1 else 0
    return reader if reader.args[0] == [parts[i] for i in range(3)] and dim in (2, -1) else None


_TRANSPOSES = (aten.permute.default, aten.transpose.int)


def _moves(node: fx.Node, heads_last: list[int], flat: list[int]) -> bool:
    """Returns True for a transpose of heads and positions, a contiguous copy, and a merge of heads."""
    value = node.meta["val"]
    if node.target in _TRANSPOSES:
        before = node.args[0].meta["val"]  # type: ignore[union-attr]
        dims = [0, 2, 1, 3] if node.target is aten.transpose.int else list(node.args[1])  # type: ignore[arg-type]
        swapped = node.target is aten.permute.default or sorted(d % 4 for d in node.args[1:]) == [1, 2]  # type: ignore
        return before.dim() == 4 and dims == [0, 2, 1, 3] and swapped and list(value.shape) == heads_last
    if node.target is aten.clone.default:
        return True
    views = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
    return node.target in views and list(value.shape) == flat and list(node.args[0].meta["val"].shape) == heads_last  # type: ignore
