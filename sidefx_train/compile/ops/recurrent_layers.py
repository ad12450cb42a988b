"""Recurrent layers on the CPU as operators: on packed sequences, and for sizes that change from call to call.

Torch's C++ code computes one time after another, and autograd records an operation for each, or needs sizes as plain
numbers. Autograd records the forward of a layer within the operator here, which calls torch's kernel, and the
backward's operator runs what was recorded, so that gradients are summed in eager's order.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.ops.cudnn_rnn import GRU, LSTM, RELU, TANH
from sidefx_train.compile.ops.recorded_forwards import Recorded, copy_of, key_of, recorded_by
from sidefx_train.compile.ops.registration import define_operator

aten = torch.ops.aten

_PACKED = {RELU: aten.rnn_relu.data, TANH: aten.rnn_tanh.data, LSTM: aten.lstm.data, GRU: aten.gru.data}
_PADDED = {RELU: aten.rnn_relu.input, TANH: aten.rnn_tanh.input, LSTM: aten.lstm.input, GRU: aten.gru.input}


class Cells(NamedTuple):
    """What a recurrent layer is, besides its tensors.

    Attributes:
        mode: kind of the cells, a number of :mod:`~sidefx_train.compile.ops.cudnn_rnn`.
        has_biases: there are biases among the weights.
        training: the module is in training mode.
        bidirectional: there are cells in both directions.
    """

    mode: int
    has_biases: bool
    training: bool
    bidirectional: bool


_CELLS = "int mode, bool has_biases, bool training, bool bidirectional"
_TENSORS = "Tensor data, Tensor? batch_sizes, Tensor hx, Tensor? cx, Tensor[] weights"
_GRADIENTS = "Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy"
_SUMS = "Tensor?[] sums"
"""For each gradient, what it is added to, one time after another; ``None`` for zero."""


def _run(data: Any, batch_sizes: Any, hx: Any, cx: Any, weights: Any, cells: Cells) -> tuple[torch.Tensor, ...]:
    states = hx if cx is None else [hx, cx]
    numbers = (cells.has_biases, 1, 0.0, cells.training, cells.bidirectional)
    if batch_sizes is None:
        return _PADDED[cells.mode](data, states, weights, *numbers, False)  # type: ignore[no-any-return]
    return _PACKED[cells.mode](data, batch_sizes, states, weights, *numbers)  # type: ignore[no-any-return]


def _differentiated(data: Any, hx: Any, cx: Any, weights: Any) -> list[torch.Tensor]:
    return [data, hx, *(() if cx is None else (cx,)), *weights]


def _record(data: Any, batch_sizes: Any, hx: Any, cx: Any, weights: Any, wanted: list[bool], cells: Cells) -> Recorded:
    given = _differentiated(data, hx, cx, weights)
    leaves = [copy_of(t).requires_grad_(needed) for t, needed in zip(given, wanted, strict=True)]
    first = len(given) - len(weights)
    made = _run(leaves[0], batch_sizes, leaves[1], None if cx is None else leaves[2], leaves[first:], cells)
    return Recorded([leaf for leaf in leaves if leaf.requires_grad], made)


def _forward(data: Any, batch_sizes: Any, hx: Any, cx: Any, weights: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    wanted, cells = rest[0], Cells(*rest[1:])
    if any(wanted):
        with compat.recording_autograd():
            recorded = _record(data, batch_sizes, hx, cx, weights, wanted, cells)
        made, key = tuple(map(compat.alias_hidden_from_autograd, recorded.results)), key_of(recorded)
        if (
            batch_sizes is None and cells.mode == LSTM
        ):  # oneDNN's backward reads the output, whose memory a graph reuses
            made = (made[0].clone(), *made[1:])
    else:
        made, key = _run(data, batch_sizes, hx, cx, weights, cells), torch.zeros(1, dtype=torch.uint8)
    return (*made, key) if cx is not None else (*made, data.new_empty(0), key)


def _forward_fake(data: Any, _: Any, hx: Any, cx: Any, weights: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    output = data.new_empty(*data.shape[:-1], hx.shape[2] * (2 if Cells(*rest[1:]).bidirectional else 1))
    cy = data.new_empty(0) if cx is None else cx.new_empty(cx.shape)
    return output, hx.new_empty(hx.shape), cy, data.new_empty(1, dtype=torch.uint8)


def _backward(data: Any, batch_sizes: Any, hx: Any, cx: Any, weights: Any, *rest: Any) -> list[torch.Tensor]:
    key, grads, wanted, cells, sums = rest[0], rest[1:4], rest[4], Cells(*rest[5:-1]), rest[-1]
    recorded = recorded_by(key)
    with compat.recording_autograd():
        if recorded is None:
            leaves, results = _record(data, batch_sizes, hx, cx, weights, wanted, cells)
        else:
            leaves, results = recorded
        given = (*zip(results, grads, strict=False), *zip(leaves, sums, strict=True))
        pairs = [(value, grad) for value, grad in given if grad is not None]
        values, weighted = zip(*pairs, strict=True)
        found = torch.autograd.grad(values, leaves, weighted, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def _backward_fake(data: Any, _: Any, hx: Any, cx: Any, weights: Any, *rest: Any) -> list[torch.Tensor]:
    given = _differentiated(data, hx, cx, weights)
    return [t.new_empty(t.shape) for t, needed in zip(given, rest[4], strict=True) if needed]


define_operator(
    f"recurrent_layer({_TENSORS}, bool[] wanted, {_CELLS}) -> (Tensor, Tensor, Tensor, Tensor)", _forward, _forward_fake
)
define_operator(
    f"recurrent_layer_backward({_TENSORS}, Tensor key, {_GRADIENTS}, bool[] wanted, {_CELLS}, {_SUMS}) -> Tensor[]",
    _backward,
    _backward_fake,
    differentiable=False,
)


# ---------------------------------------------------------------------- autograd
class Watch(Protocol):
    """What a capture does around a recorded backward."""

    def check(self) -> None:
        """Stops the capture at a backward that it cannot record."""

    def note(self, data: torch.Tensor | None, weights: tuple[torch.Tensor | None, ...]) -> None:
        """Takes the gradients of the data and the weights, where they have one."""


class RecurrentLayer(torch.autograd.Function):
    """One recurrent layer, time first: ``apply(watch, cells, data, batch_sizes, hx, cx, *weights)``.

    With batch sizes, ``data`` is that of a packed sequence. Before a backward, ``watch.check()`` is called, and
    ``watch.note`` with its gradients after.
    """

    @staticmethod
    def forward(
        ctx: Any,
        watch: Watch,
        cells: Cells,
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
        *made, key = torch.ops.sidefx.recurrent_layer.default(*given, ctx.wanted, *cells)
        ctx.set_materialize_grads(False)
        ctx.watch, ctx.cells = watch, cells
        ctx.save_for_backward(data, batch_sizes, hx, cx, key, *weights)
        if cx is None:
            ctx.mark_non_differentiable(made[2])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, grad_output: Any, grad_hy: Any, grad_cy: Any) -> Any:
        """Returns the gradients of the tensors."""
        ctx.watch.check()
        data, batch_sizes, hx, cx, key, *weights = ctx.saved_tensors
        grads = (grad_output, grad_hy, grad_cy if ctx.has_cell else None)
        given = (data, batch_sizes, hx, cx, weights, key, *grads, ctx.wanted, *ctx.cells)
        found = iter(torch.ops.sidefx.recurrent_layer_backward.default(*given, [None] * sum(ctx.wanted)))
        each = tuple(next(found) if needed else None for needed in ctx.needs_input_grad[2:])
        of_data, _sizes, _hx, _cx, *of_weights = each
        ctx.watch.note(of_data, tuple(of_weights))
        return (None, None, *each)
