"""Recurrent layers: calls of cuDNN, layers on packed sequences, and layers for changing sizes stay whole in the graph.

torch's C++ code asks for the weights' storage, to see whether they are flattened, computes one time after another, or
needs sizes as plain numbers; a capture cannot follow that.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train.compile.capture.interceptors.derivatives import once_differentiated
from sidefx_train.compile.capture.interceptors.nn.packed_sequences import is_captured
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.distributed_models import refuse_whole
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.ops import cudnn_rnn, recurrent_layers

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

aten = torch.ops.aten

_ARGUMENTS = 9
_NO_GRADIENT = (aten.detach.default, torch.ops.sidefx.recurrent_layer_backward.default)


def runs_on_cudnn(input: torch.Tensor) -> bool:
    """Returns True for an input that torch passes to cuDNN in the precision that it has."""
    kind = input.device.type
    return kind == "cuda" and not torch.is_autocast_enabled(kind) and torch.backends.cudnn.is_acceptable(input)


def _recurrent(mode: int, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the operator for ``(input, states, weights, bias, layers, dropout, training, bidirectional, batch_first)``,
    or for ``(data, batch_sizes, states, weights, bias, layers, dropout, training, bidirectional)``.

    What torch passes to cuDNN with dropout between layers, or projections, is left to torch.
    """
    if kwargs or len(args) != _ARGUMENTS or not safe_isinstance(args[0], torch.Tensor):
        return ABSENT
    if type(args[4]) is bool:
        data, batch_sizes, *rest = args
        return _on_host(mode, world, data, batch_sizes, rest) if is_captured(batch_sizes) else ABSENT
    if type(args[3]) is not bool:
        return ABSENT
    if args[0].dim() == 3 and not _has_plain_sizes(args[0]):
        return _of_changing_sizes(mode, world, args)
    input, states, weights, _, layers, dropout, training, bidirectional, batch_first = args
    if not runs_on_cudnn(input) or (training and dropout) or not _is_static(input):
        return ABSENT
    hx, cx = world.interp.iterate(states) if mode == cudnn_rnn.LSTM else (states, None)
    weights = world.interp.iterate(weights)
    tensors = (input, hx, *(() if cx is None else (cx,)), *weights)
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if (cx is not None and cx.shape != hx.shape) or not all(map(_is_static, tensors)) or (needed and not training):
        return ABSENT
    layer = cudnn_rnn.Layer(mode, layers, batch_first, bidirectional, training)
    try:
        sizes = cudnn_rnn.result_sizes(input, weights, hx, cx, layer)
    except RuntimeError:  # cuDNN refuses the layer, or there is no memory to try it
        return ABSENT
    output, hy, cy = world.guarded(cudnn_rnn.RecurrentLayer.apply, (layer, sizes, input, hx, cx, *weights), {})
    return (output, hy, cy) if mode == cudnn_rnn.LSTM else (output, hy)


def _of_changing_sizes(mode: int, world: TraceWorld, args: tuple[Any, ...]) -> Any:
    input, *rest, batch_first = args
    data = input.transpose(0, 1) if batch_first else input
    made = _on_host(mode, world, data, None, rest)
    if made is ABSENT or not batch_first:
        return made
    return (made[0].transpose(0, 1), *made[1:])


def _on_host(mode: int, world: TraceWorld, data: Any, batch_sizes: Any, rest: list[Any]) -> Any:
    """Calls the operators of :mod:`~sidefx_train.compile.ops.recurrent_layers`.

    Args:
        mode: kind of the cells.
        world: the capture.
        data: input, time first, or data of a packed sequence.
        batch_sizes: those of a packed sequence, or ``None``.
        rest: ``states, weights, bias, layers, dropout, training, bidirectional``.

    Returns:
        What torch's function returns; :data:`~sidefx_train.compile.common.sentinels.ABSENT` for another call.

    """
    states, weights, has_biases, layers, dropout, training, bidirectional = rest
    if not is_captured(data) or torch.is_autocast_enabled("cpu") or type(dropout) is not float:
        return ABSENT
    hx, cx = world.interp.iterate(states) if mode == cudnn_rnn.LSTM else (states, None)
    weights = list(world.interp.iterate(weights))
    if not all(map(is_captured, (hx, *(() if cx is None else (cx,)), *weights))):
        return ABSENT
    directions = 2 if bidirectional else 1
    each = len(weights) // layers
    cells = recurrent_layers.Cells(mode, has_biases, training, bidirectional)
    found: list[tuple[Any, ...]] = []
    states = zip(hx.split(directions), [None] * layers if cx is None else cx.split(directions), strict=True)
    for index, state in enumerate(states):
        own = weights[index * each : (index + 1) * each]
        data, *last = _layer(world, cells, data, batch_sizes, state, own)
        found.append(tuple(last))
        if dropout and training and index < layers - 1:
            data = world.guarded(torch.dropout, (data, dropout, True), {})
    hy, cy = (world.guarded(torch.cat, (list(parts),), {}) for parts in zip(*found, strict=True))
    return (data, hy) if cx is None else (data, hy, cy)


def _layer(
    world: TraceWorld,
    cells: recurrent_layers.Cells,
    data: Any,
    batch_sizes: Any,
    states: tuple[Any, Any],
    weights: list[Any],
) -> Any:
    """Returns output, ``hy`` and ``cy`` of one layer."""
    summed = _summed_weights(cells, weights)
    data_is_summed = cells.bidirectional
    if batch_sizes is None and _runs_on_onednn(cells, data, weights):
        summed = [False] * len(weights)  # one call, which returns one gradient of each
    tensors = [weight for weight, is_sum in zip(weights, summed, strict=True) if is_sum]
    tensors += [data] if data_is_summed else []
    nodes = [world.tracer.node_of(tensor) for tensor in tensors if tensor.requires_grad]
    watch = _Watch(once_differentiated(world, "a recurrent layer"), weakref.ref(world), nodes, (data_is_summed, summed))
    return world.guarded(
        recurrent_layers.RecurrentLayer.apply, (watch, cells, data, batch_sizes, *states, *weights), {}
    )


def _runs_on_onednn(cells: recurrent_layers.Cells, data: Any, weights: list[Any]) -> bool:
    each = len(weights) // (2 if cells.bidirectional else 1)
    projected = each != (4 if cells.has_biases else 2)
    plain = cells.mode == cudnn_rnn.LSTM and data.dtype is torch.float32 and not projected
    return plain and torch.backends.mkldnn.enabled and not cells.bidirectional


def _summed_weights(cells: recurrent_layers.Cells, weights: list[Any]) -> list[bool]:
    """Returns for each weight True if it has a gradient for each time: all have but those of the input."""
    each = len(weights) // (2 if cells.bidirectional else 1)
    of_input = (0, 2) if cells.has_biases else (0,)
    return [place % each not in of_input for place in range(len(weights))]


@dataclass
class _Watch:
    """What happens around the backward of one layer, while a capture records it.

    Attributes:
        once: stops the capture if the backward is to be differentiated.
        world: the capture, which is not kept alive.
        nodes: tensors whose gradients are sums over time.
        summed: whether the gradient of the data is such a sum, and that of each weight.
    """

    once: Callable[[], None]
    world: weakref.ref[TraceWorld]
    nodes: list[fx.Node]
    summed: tuple[bool, list[bool]]

    def check(self) -> None:
        """Stops the capture if a tensor has other gradients that the engine outside would add.

        Eager adds the gradients of each time one by one to those that are already there.
        """
        self.once()
        world = self._capture()
        if world.tracer.proxy_mode.recurrent_sums.in_step:
            return
        if any(sum(map(_may_have_gradient, node.users)) > 1 for node in self.nodes):
            reason = "a weight of a recurrent layer for changing lengths has other uses, too"
            refuse_whole("SFX102", reason, world.locate())

    def note(self, data: torch.Tensor | None, weights: tuple[torch.Tensor | None, ...]) -> None:
        """Has the operator of the backward begin the sums with what the engine has of the same gradients."""
        of_data, of_weights = self.summed
        self._capture().tracer.proxy_mode.recurrent_sums.note((data, *weights), (of_data, *of_weights))

    def _capture(self) -> TraceWorld:
        world = self.world()
        assert world is not None, "a backward is recorded after its capture"
        return world


def _may_have_gradient(user: fx.Node) -> bool:
    """Returns True for an operation on a tensor through which a gradient of that tensor may come."""
    return user.target not in _NO_GRADIENT and not (user.target is aten.view.default and not user.users)


def _is_static(tensor: Any) -> bool:
    """Returns True for a tensor with known sizes, and elements."""
    return _has_plain_sizes(tensor) and tensor.numel() > 0


def _has_plain_sizes(tensor: Any) -> bool:
    return all(type(size) is int for size in tensor.shape)


for _function, _mode in (
    (torch.rnn_relu, cudnn_rnn.RELU),
    (torch.rnn_tanh, cudnn_rnn.TANH),
    (torch.lstm, cudnn_rnn.LSTM),
    (torch.gru, cudnn_rnn.GRU),
):
    registry.intercept(_function)(functools.partial(_recurrent, _mode))
