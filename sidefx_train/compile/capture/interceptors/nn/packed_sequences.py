"""Packed sequences: the prologue reads how long sequences are, and recurrent layers on them stay whole in the graph.

Torch's C code reads lengths and batch sizes, to choose by them what it computes; a capture cannot follow that.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.constant_folding import constant_value
from sidefx_train.compile.capture.world.symbolic_numbers.scalar_tensors import host_value
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.distributed_models import refuse_whole
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.ops import packed_sequences as ops

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

aten = torch.ops.aten

_NO_GRADIENT = (aten.detach.default, torch.ops.sidefx.packed_rnn_backward.default)
_ARGUMENTS = 9


@registry.intercept(compat.pack_sequences)
def _pack(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the operator for ``(input, lengths, batch_first)`` if the prologue can read the lengths."""
    if kwargs or len(args) != 3 or type(args[2]) is not bool or not all(map(_is_captured, args[:2])):
        return ABSENT
    input, lengths, batch_first = args
    if input.dim() < 2 or lengths.dim() != 1 or lengths.dtype is not torch.int64:
        return ABSENT
    total = _number(world, world.guarded(torch.sum, (lengths,), {}))
    longest = _number(world, world.guarded(torch.max, (lengths,), {}))
    if total is None or longest is None:
        world.host_reads.want((lengths,))
        return ABSENT
    times = world.guarded(torch.arange, (longest,), {}).unsqueeze(1)
    batch_sizes = world.guarded(torch.sum, (lengths > times, 1), {})
    time_first = input.transpose(0, 1) if batch_first else input
    data = world.guarded(ops.Pack.apply, (once_differentiated(world), time_first, lengths, batch_sizes, total), {})
    return data, batch_sizes


@registry.intercept(compat.pad_sequences)
def _pad(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the operator for ``(data, batch_sizes, batch_first, padding_value, total_length)``."""
    if kwargs or len(args) != 5 or type(args[2]) is not bool or not all(map(_is_captured, args[:2])):
        return ABSENT
    data, batch_sizes, batch_first, value, time = args
    if type(value) not in (int, float):
        return ABSENT
    batch = _number(world, batch_sizes[0])
    if batch is None:
        world.host_reads.want((batch_sizes,))
        return ABSENT
    check = once_differentiated(world)
    padded = world.guarded(ops.Pad.apply, (check, data, batch_sizes, float(value), time, batch), {})
    places = world.guarded(torch.arange, (batch,), {})
    lengths = world.guarded(torch.sum, (batch_sizes.unsqueeze(1) > places, 0), {})
    return (padded.transpose(0, 1) if batch_first else padded), lengths


def recurrent(mode: int, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the operators for ``(data, batch_sizes, states, weights, bias, layers, dropout, training,
    bidirectional)``.

    Returns:
        What torch's function returns; :data:`~sidefx_train.compile.common.sentinels.ABSENT` for another call.

    Raises:
        Unsupported: weights have gradients from elsewhere, too, which would be summed in another order.
    """
    if kwargs or len(args) != _ARGUMENTS or type(args[4]) is not bool or not all(map(_is_captured, args[:2])):
        return ABSENT
    data, batch_sizes, states, weights, has_biases, layers, dropout, training, bidirectional = args
    if torch.is_autocast_enabled("cpu") or type(dropout) is not float:
        return ABSENT
    hx, cx = world.interp.iterate(states) if mode == ops.LSTM else (states, None)
    weights = list(world.interp.iterate(weights))
    if not all(map(_is_captured, (hx, *(() if cx is None else (cx,)), *weights))):
        return ABSENT
    directions = 2 if bidirectional else 1
    each = len(weights) // layers
    layer = ops.PackedLayer(mode, has_biases, bidirectional)
    found: list[tuple[Any, ...]] = []
    states = zip(hx.split(directions), [None] * layers if cx is None else cx.split(directions), strict=True)
    for index, state in enumerate(states):
        own = weights[index * each : (index + 1) * each]
        data, *last = _layer(world, layer, data, batch_sizes, state, own)
        found.append(tuple(last))
        if dropout and training and index < layers - 1:
            data = world.guarded(torch.dropout, (data, dropout, True), {})
    hy, cy = (world.guarded(torch.cat, (list(parts),), {}) for parts in zip(*found, strict=True))
    return (data, hy) if cx is None else (data, hy, cy)


def _layer(
    world: TraceWorld, layer: ops.PackedLayer, data: Any, batch_sizes: Any, states: tuple[Any, Any], weights: list[Any]
) -> Any:
    """Returns output, ``hy`` and ``cy`` of one layer."""
    summed = _summed_weights(layer, weights) + ([data] if layer.bidirectional else [])
    nodes = [world.tracer.node_of(tensor) for tensor in summed if tensor.requires_grad]
    check = functools.partial(_check, weakref.ref(world), tuple(nodes))
    return world.guarded(ops.PackedRecurrentLayer.apply, (check, layer, data, batch_sizes, *states, *weights), {})


def _summed_weights(layer: ops.PackedLayer, weights: list[Any]) -> list[Any]:
    """Returns the weights that have a gradient for each time: all but those of the input."""
    each = len(weights) // (2 if layer.bidirectional else 1)
    of_input = (0, 2) if layer.has_biases else (0,)
    return [weight for place, weight in enumerate(weights) if place % each not in of_input]


def once_differentiated(world: TraceWorld) -> Any:
    """Returns a function that stops the capture if a backward is to be differentiated."""
    return functools.partial(_check, weakref.ref(world), ())


def _check(reference: Any, nodes: tuple[fx.Node, ...]) -> None:
    """Stops the capture if a backward is to be differentiated, or if a tensor has gradients from other operations.

    Eager adds the gradients of each time one by one to those that are already there.
    """
    world = reference()
    assert world is not None, "a backward is recorded after its capture"
    if torch.is_grad_enabled():
        refuse_whole("SFX102", "the derivative of the backward of rows of several lengths", world.locate())
    for node in nodes:
        if sum(map(_may_have_gradient, node.users)) > 1:
            refuse_whole("SFX102", "a weight of a packed recurrent layer has other uses, too", world.locate())


def _may_have_gradient(user: fx.Node) -> bool:
    """Returns True for an operation on a tensor through which a gradient of that tensor may come."""
    return user.target not in _NO_GRADIENT and not (user.target is aten.view.default and not user.users)


def _number(world: TraceWorld, tensor: torch.Tensor) -> Any:
    """Returns the number in a tensor; ``None`` if it exists only when the graph runs."""
    known = constant_value(world.tracer, tensor)
    return host_value(world, tensor) if known is None else known.item()


def _is_captured(tensor: Any) -> bool:
    return type(tensor) is compat.FakeTensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
