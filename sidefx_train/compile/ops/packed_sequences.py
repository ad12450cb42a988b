"""Packed sequences and recurrent layers on them as operators of known sizes.

Torch's kernels read lengths and batch sizes on the host and choose by them what they compute: their results have sizes
that depend on data, and autograd records an operation for each time. The operators here call these kernels, with sizes
as arguments. Autograd records the forward of a recurrent layer within the operator, and the backward's operator runs
what was recorded, so that gradients are summed in eager's order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.ops.cudnn_rnn import GRU, LSTM, RELU, TANH
from sidefx_train.compile.ops.recorded_forwards import Recorded, copy_of, key_of, recorded_by
from sidefx_train.compile.ops.registration import define_operator

aten = torch.ops.aten

_KERNELS = {RELU: aten.rnn_relu.data, TANH: aten.rnn_tanh.data, LSTM: aten.lstm.data, GRU: aten.gru.data}


class PackedLayer(NamedTuple):
    """What a recurrent layer on a packed sequence is, besides its tensors.

    Attributes:
        mode: kind of the cells, a number of :mod:`~sidefx_train.compile.ops.cudnn_rnn`.
        has_biases: there are biases among the weights.
        bidirectional: there are cells in both directions.
    """

    mode: int
    has_biases: bool
    bidirectional: bool


_LAYER = "int mode, bool has_biases, bool bidirectional"
_TENSORS = "Tensor data, Tensor batch_sizes, Tensor hx, Tensor? cx, Tensor[] weights"
_GRADIENTS = "Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy"


# ---------------------------------------------------------------------- packing
def _pack(input: torch.Tensor, lengths: torch.Tensor, _: int) -> torch.Tensor:
    return aten._pack_padded_sequence.default(input, lengths, False)[0]  # type: ignore[no-any-return]


def _pack_fake(input: torch.Tensor, _: torch.Tensor, total: int) -> torch.Tensor:
    return input.new_empty(total, *input.shape[2:])


def _pack_backward(grad: torch.Tensor, batch_sizes: torch.Tensor, time: int, batch: int) -> torch.Tensor:
    size = (time, batch, *grad.shape[1:])
    return aten._pack_padded_sequence_backward.default(grad, size, batch_sizes, False)  # type: ignore[no-any-return]


def _pack_backward_fake(grad: torch.Tensor, _: torch.Tensor, time: int, batch: int) -> torch.Tensor:
    return grad.new_empty(time, batch, *grad.shape[1:])


def _pad(data: torch.Tensor, batch_sizes: torch.Tensor, value: float, time: int, _: int) -> torch.Tensor:
    return aten._pad_packed_sequence.default(data, batch_sizes, False, value, time)[0]  # type: ignore[no-any-return]


def _pad_fake(data: torch.Tensor, _: torch.Tensor, value: float, time: int, batch: int) -> torch.Tensor:
    return data.new_empty(time, batch, *data.shape[1:])


def _pad_backward(grad: torch.Tensor, batch_sizes: torch.Tensor, total: int) -> torch.Tensor:
    with compat.recording_autograd():
        data = grad.new_zeros(total, *grad.shape[2:]).requires_grad_()
        padded = aten._pad_packed_sequence.default(data, batch_sizes, False, 0.0, grad.shape[0])[0]
        return torch.autograd.grad(padded, data, grad)[0]


def _pad_backward_fake(grad: torch.Tensor, _: torch.Tensor, total: int) -> torch.Tensor:
    return grad.new_empty(total, *grad.shape[2:])


define_operator("pack_padded_sequence(Tensor input, Tensor lengths, SymInt total) -> Tensor", _pack, _pack_fake)
define_operator(
    "pack_padded_sequence_backward(Tensor grad, Tensor batch_sizes, SymInt time, SymInt batch) -> Tensor",
    _pack_backward,
    _pack_backward_fake,
    differentiable=False,
)
define_operator(
    "pad_packed_sequence(Tensor data, Tensor batch_sizes, float value, SymInt time, SymInt batch) -> Tensor",
    _pad,
    _pad_fake,
)
define_operator(
    "pad_packed_sequence_backward(Tensor grad, Tensor batch_sizes, SymInt total) -> Tensor",
    _pad_backward,
    _pad_backward_fake,
    differentiable=False,
)


# ---------------------------------------------------------------------- recurrent layers
def _run(data: Any, batch_sizes: Any, hx: Any, cx: Any, weights: Any, layer: PackedLayer) -> tuple[torch.Tensor, ...]:
    states = hx if cx is None else [hx, cx]
    numbers = (layer.has_biases, 1, 0.0, False, layer.bidirectional)
    return _KERNELS[layer.mode](data, batch_sizes, states, weights, *numbers)  # type: ignore[no-any-return]


def _differentiated(data: Any, hx: Any, cx: Any, weights: Any) -> list[torch.Tensor]:
    return [data, hx, *(() if cx is None else (cx,)), *weights]


def _record(
    data: Any, batch_sizes: Any, hx: Any, cx: Any, weights: Any, wanted: list[bool], layer: PackedLayer
) -> Recorded:
    given = _differentiated(data, hx, cx, weights)
    leaves = [copy_of(t).requires_grad_(needed) for t, needed in zip(given, wanted, strict=True)]
    first = len(given) - len(weights)
    made = _run(leaves[0], batch_sizes, leaves[1], None if cx is None else leaves[2], leaves[first:], layer)
    return Recorded([leaf for leaf in leaves if leaf.requires_grad], made)


def _forward(data: Any, batch_sizes: Any, hx: Any, cx: Any, weights: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    wanted, layer = rest[0], PackedLayer(*rest[1:])
    if any(wanted):
        with compat.recording_autograd():
            recorded = _record(data, batch_sizes, hx, cx, weights, wanted, layer)
        made, key = tuple(map(compat.alias_hidden_from_autograd, recorded.results)), key_of(recorded)
    else:
        made, key = _run(data, batch_sizes, hx, cx, weights, layer), torch.zeros(1, dtype=torch.uint8)
    return (*made, key) if cx is not None else (*made, data.new_empty(0), key)


def _forward_fake(data: Any, _: Any, hx: Any, cx: Any, weights: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    output = data.new_empty(data.shape[0], hx.shape[2] * (2 if PackedLayer(*rest[1:]).bidirectional else 1))
    cy = data.new_empty(0) if cx is None else cx.new_empty(cx.shape)
    return output, hx.new_empty(hx.shape), cy, data.new_empty(1, dtype=torch.uint8)


def _backward(data: Any, batch_sizes: Any, hx: Any, cx: Any, weights: Any, *rest: Any) -> list[torch.Tensor]:
    key, grads, wanted, layer = rest[0], rest[1:4], rest[4], PackedLayer(*rest[5:])
    recorded = recorded_by(key)
    with compat.recording_autograd():
        if recorded is None:
            leaves, results = _record(data, batch_sizes, hx, cx, weights, wanted, layer)
        else:
            leaves, results = recorded
        pairs = [(value, grad) for value, grad in zip(results, grads, strict=False) if grad is not None]
        values, weighted = zip(*pairs, strict=True)
        found = torch.autograd.grad(values, leaves, weighted, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def _backward_fake(data: Any, _: Any, hx: Any, cx: Any, weights: Any, *rest: Any) -> list[torch.Tensor]:
    given = _differentiated(data, hx, cx, weights)
    return [t.new_empty(t.shape) for t, needed in zip(given, rest[4], strict=True) if needed]


define_operator(
    f"packed_rnn({_TENSORS}, bool[] wanted, {_LAYER}) -> (Tensor, Tensor, Tensor, Tensor)", _forward, _forward_fake
)
define_operator(
    f"packed_rnn_backward({_TENSORS}, Tensor key, {_GRADIENTS}, bool[] wanted, {_LAYER}) -> Tensor[]",
    _backward,
    _backward_fake,
    differentiable=False,
)


# ---------------------------------------------------------------------- autograd
class Pack(torch.autograd.Function):
    """Packs sequences, time first: ``apply(check, input, lengths, batch_sizes, total)``."""

    @staticmethod
    def forward(ctx: Any, check: Callable[[], None], input: Any, lengths: Any, batch_sizes: Any, total: Any) -> Any:
        """Returns the data of the packed sequence."""
        ctx.check, ctx.sizes = check, input.shape[:2]
        ctx.save_for_backward(batch_sizes)
        return torch.ops.sidefx.pack_padded_sequence.default(input, lengths, total)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradient of the input."""
        ctx.check()
        (batch_sizes,) = ctx.saved_tensors
        made = torch.ops.sidefx.pack_padded_sequence_backward.default(grad, batch_sizes, *ctx.sizes)
        return None, made, None, None, None


class Pad(torch.autograd.Function):
    """Unpacks a packed sequence, time first: ``apply(check, data, batch_sizes, value, time, batch)``."""

    @staticmethod
    def forward(ctx: Any, check: Callable[[], None], data: Any, batch_sizes: Any, *numbers: Any) -> Any:
        """Returns the sequences, padded with ``value``."""
        ctx.check, ctx.total = check, data.shape[0]
        ctx.save_for_backward(batch_sizes)
        return torch.ops.sidefx.pad_packed_sequence.default(data, batch_sizes, *numbers)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradient of the data."""
        ctx.check()
        (batch_sizes,) = ctx.saved_tensors
        made = torch.ops.sidefx.pad_packed_sequence_backward.default(grad, batch_sizes, ctx.total)
        return None, made, None, None, None, None


class PackedRecurrentLayer(torch.autograd.Function):
    """One recurrent layer on a packed sequence: ``apply(check, layer, data, batch_sizes, hx, cx, *weights)``."""

    @staticmethod
    def forward(
        ctx: Any,
        check: Callable[[], None],
        layer: PackedLayer,
        data: Any,
        batch_sizes: Any,
        hx: Any,
        cx: Any,
        *weights: Any,
    ) -> Any:
        """Returns output, ``hy`` and ``cy``."""
        needed = ctx.needs_input_grad[2:]
        ctx.has_cell = cx is not None
        ctx.wanted = [needed[0], needed[2], *([needed[3]] if ctx.has_cell else []), *needed[4:]]
        given = (data, batch_sizes, hx, cx, list(weights))
        *made, key = torch.ops.sidefx.packed_rnn.default(*given, ctx.wanted, *layer)
        ctx.set_materialize_grads(False)
        ctx.check, ctx.layer = check, layer
        ctx.save_for_backward(data, batch_sizes, hx, cx, key, *weights)
        if cx is None:
            ctx.mark_non_differentiable(made[2])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, grad_output: Any, grad_hy: Any, grad_cy: Any) -> Any:
        """Returns the gradients of the tensors."""
        ctx.check()
        data, batch_sizes, hx, cx, key, *weights = ctx.saved_tensors
        grads = (grad_output, grad_hy, grad_cy if ctx.has_cell else None)
        given = (data, batch_sizes, hx, cx, weights, key, *grads, ctx.wanted, *ctx.layer)
        found = iter(torch.ops.sidefx.packed_rnn_backward.default(*given))
        return (None, None, *(next(found) if needed else None for needed in ctx.needs_input_grad[2:]))
