"""cuDNN's recurrent layers as composite operators.

torch's operators have two results whose sizes only cuDNN knows, and views of one buffer as gradients of the weights.
The two operators here are the same calls with true sizes and with results of their own. They copy the weights to one
buffer at each call, as torch does for weights that are not flattened.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.distributed_models import refuse_whole
from sidefx_train.compile.ops.registration import define_operator

aten = torch.ops.aten

RELU, TANH, LSTM, GRU = range(4)
"""cuDNN's numbers of the kinds of cells."""


class Layer(NamedTuple):
    """What a recurrent layer is, besides its tensors.

    Attributes:
        mode: kind of the cells.
        layers: number of layers.
        batch_first: the first dimension of the input is the batch, not time.
        bidirectional: there are cells in both directions.
        train: a backward may follow.
    """

    mode: int
    layers: int
    batch_first: bool
    bidirectional: bool
    train: bool


_LAYER = "int mode, int layers, bool batch_first, bool bidirectional, bool train"
_FORWARD = (
    f"cudnn_rnn(Tensor input, Tensor[] weights, Tensor hx, Tensor? cx, {_LAYER}, int reserve, int buffer)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "cudnn_rnn_backward(Tensor input, Tensor[] weights, Tensor hx, Tensor? cx, Tensor output, Tensor reserve,"
    f" Tensor buffer, Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, {_LAYER}) -> Tensor[]"
)


def _numbers(layer: Layer, hx: torch.Tensor) -> tuple[Any, ...]:
    """Returns the numbers that torch's operators take, in their order, without dropout and packed sequences."""
    mode, layers, batch_first, bidirectional, train = layer
    return (mode, hx.shape[2], 0, layers, batch_first, 0.0, train, bidirectional, [], None)


def _per_layer(weights: Any, layer: Layer) -> int:
    return len(weights) // (layer.layers * (2 if layer.bidirectional else 1))


def _call(input: Any, weights: Any, hx: Any, cx: Any, layer: Layer) -> tuple[torch.Tensor, ...]:
    numbers = _numbers(layer, hx)
    return aten._cudnn_rnn.default(input, weights, _per_layer(weights, layer), None, hx, cx, *numbers)  # type: ignore[no-any-return]


def _forward(input: Any, weights: Any, hx: Any, cx: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    layer = Layer(*rest[:5])
    output, *states = _call(input, weights, hx, cx, layer)
    return _time_first(output, layer), *states


def _time_first(value: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Returns a value of all times in cuDNN's memory layout, which it has already."""
    return value.transpose(0, 1).contiguous().transpose(0, 1) if layer.batch_first else value.contiguous()


def _forward_fake(input: Any, weights: Any, hx: Any, cx: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    layer, (reserve, buffer) = Layer(*rest[:5]), rest[5:]
    time, batch = (input.shape[1], input.shape[0]) if layer.batch_first else input.shape[:2]
    output = input.new_empty(time, batch, hx.shape[2] * (2 if layer.bidirectional else 1))
    cy = input.new_empty(0) if cx is None else cx.new_empty(cx.shape)
    made = output.transpose(0, 1) if layer.batch_first else output
    return made, hx.new_empty(hx.shape), cy, input.new_empty(reserve, dtype=torch.uint8), input.new_empty(buffer)


def _backward(input: Any, weights: Any, hx: Any, cx: Any, output: Any, reserve: Any, buffer: Any, *rest: Any) -> Any:
    grads, layer = rest[:3], Layer(*rest[3:])
    kept = reserve.clone()  # cuDNN writes to it
    given = (input, weights, _per_layer(weights, layer), buffer, hx, cx, output, *grads, *_numbers(layer, hx), kept)
    dx, dhx, dcx, dweights = aten._cudnn_rnn_backward.default(*given, [True, True, cx is not None, True])
    own = [grad.reshape(weight.shape).clone() for grad, weight in zip(dweights, weights, strict=True)]
    return [_time_first(dx, layer), dhx, input.new_empty(0) if cx is None else dcx, *own]


def _backward_fake(input: Any, weights: Any, hx: Any, cx: Any, *rest: Any) -> list[torch.Tensor]:
    layer = Layer(*rest[6:])
    size = (input.shape[1], input.shape[0], input.shape[2]) if layer.batch_first else input.shape
    dx = input.new_empty(size)
    states = [hx.new_empty(hx.shape), input.new_empty(0) if cx is None else cx.new_empty(cx.shape)]
    return [dx.transpose(0, 1) if layer.batch_first else dx, *states, *[w.new_empty(w.shape) for w in weights]]


define_operator(_FORWARD, _forward, _forward_fake, key="CompositeExplicitAutograd")
define_operator(_BACKWARD, _backward, _backward_fake, key="CompositeExplicitAutograd", differentiable=False)


def result_sizes(input: Any, weights: Any, hx: Any, cx: Any, layer: Layer) -> tuple[int, int]:
    """Returns the bytes that a forward call reserves, and the elements of its buffer of weights, by calling it on
    zeros."""
    tensors = (input, hx, *(() if cx is None else (cx,)), *weights)
    return _sizes(tuple(tuple(t.shape) for t in tensors), input.dtype, input.device, cx is not None, layer)


@functools.lru_cache(maxsize=256)
def _sizes(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device, has_cell: bool, layer: Layer
) -> tuple[int, int]:
    with compat.outside_tracing(), torch.no_grad():
        input, hx, *rest = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        cx = rest.pop(0) if has_cell else None
        *_, reserve, buffer = _call(input, rest, hx, cx, layer)
    return reserve.numel(), buffer.numel()


class RecurrentLayer(torch.autograd.Function):
    """One call of cuDNN's recurrent layers, with its derivative: ``apply(layer, sizes, input, hx, cx, *weights)``."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, sizes: tuple[int, int], input: Any, hx: Any, cx: Any, *weights: Any) -> Any:
        """Returns output, ``hy`` and ``cy``."""
        made = torch.ops.sidefx.cudnn_rnn.default(input, list(weights), hx, cx, *layer, *sizes)
        output, hy, cy, reserve, buffer = made
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.has_cell = layer, cx is not None
        ctx.save_for_backward(input, hx, cx, output, reserve, buffer, *weights)
        if cx is None:
            ctx.mark_non_differentiable(cy)
        return output, hy, cy

    @staticmethod
    def backward(ctx: Any, grad_output: Any, grad_hy: Any, grad_cy: Any) -> Any:
        """Returns the gradients of the tensors."""
        if torch.is_grad_enabled():
            refuse_whole("SFX102", "the derivative of the backward of a recurrent layer", None)
        input, hx, cx, output, reserve, buffer, *weights = ctx.saved_tensors
        grads = (grad_output, grad_hy, grad_cy if ctx.has_cell else None)
        given = (input, weights, hx, cx, output, reserve, buffer, *grads, *ctx.layer)
        dx, dhx, dcx, *dweights = torch.ops.sidefx.cudnn_rnn_backward.default(*given)
        found = (dx, dhx, dcx if ctx.has_cell else None, *dweights)
        wanted = ctx.needs_input_grad[2:]
        return (None, None, *(grad if needed else None for grad, needed in zip(found, wanted, strict=True)))
