"""Recurrent layers: calls of cuDNN, and layers on packed sequences, stay whole in the graph.

torch's C++ code asks for the weights' storage, to see whether they are flattened; a capture cannot follow that.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.interceptors.nn import packed_sequences
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.ops import cudnn_rnn

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_ARGUMENTS = 9


def runs_on_cudnn(input: torch.Tensor) -> bool:
    """Returns True for an input that torch passes to cuDNN in the precision that it has."""
    kind = input.device.type
    return kind == "cuda" and not torch.is_autocast_enabled(kind) and torch.backends.cudnn.is_acceptable(input)


def _recurrent(mode: int, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the operator for ``(input, states, weights, bias, layers, dropout, training, bidirectional, batch_first)``;
    dropout between layers and projections are left to torch."""
    packed = packed_sequences.recurrent(mode, world, args, kwargs)
    if packed is not ABSENT:
        return packed
    if kwargs or len(args) != _ARGUMENTS or type(args[3]) is not bool or not safe_isinstance(args[0], torch.Tensor):
        return ABSENT
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


def _is_static(tensor: Any) -> bool:
    """Returns True for a tensor with known sizes, and elements."""
    return all(type(size) is int for size in tensor.shape) and tensor.numel() > 0


for _function, _mode in (
    (torch.rnn_relu, cudnn_rnn.RELU),
    (torch.rnn_tanh, cudnn_rnn.TANH),
    (torch.lstm, cudnn_rnn.LSTM),
    (torch.gru, cudnn_rnn.GRU),
):
    registry.intercept(_function)(functools.partial(_recurrent, _mode))
