"""Packed sequences: the prologue reads how long sequences are.

Torch's C code reads lengths and batch sizes, to choose by them what it computes; a capture cannot follow that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interceptors.derivatives import once_differentiated
from sidefx_train.compile.capture.recording.constant_folding import constant_value
from sidefx_train.compile.capture.world.symbolic_numbers.scalar_tensors import host_value
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.ops import packed_sequences as ops

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_ROWS = "rows of several lengths"


@registry.intercept(compat.pack_sequences)
def _pack(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the operator for ``(input, lengths, batch_first)`` if the prologue can read the lengths."""
    if kwargs or len(args) != 3 or type(args[2]) is not bool or not all(map(is_captured, args[:2])):
        return ABSENT
    input, lengths, batch_first = args
    if input.dim() < 2 or lengths.dim() != 1 or lengths.dtype is not torch.int64:
        return ABSENT
    total = _number(world, world.guarded(torch.sum, (lengths,), {}))
    longest = _number(world, world.guarded(torch.max, (lengths,), {}))
    if total is None or longest is None:  # the fake kernel of torch gives the data a wrong size
        world.host_reads.want((lengths,))
        world.heap.refuse("SFX101", "torch._pack_padded_sequence needs a value that exists only when the graph runs")
    times = world.guarded(torch.arange, (longest,), {}).unsqueeze(1)
    batch_sizes = world.guarded(torch.sum, (lengths > times, 1), {})
    time_first = input.transpose(0, 1) if batch_first else input
    data = world.guarded(
        ops.Pack.apply, (once_differentiated(world, _ROWS), time_first, lengths, batch_sizes, total), {}
    )
    return data, batch_sizes


@registry.intercept(compat.pad_sequences)
def _pad(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the operator for ``(data, batch_sizes, batch_first, padding_value, total_length)``."""
    if kwargs or len(args) != 5 or type(args[2]) is not bool or not all(map(is_captured, args[:2])):
        return ABSENT
    data, batch_sizes, batch_first, value, time = args
    if type(value) not in (int, float):
        return ABSENT
    batch = _number(world, batch_sizes[0])
    if batch is None:
        world.host_reads.want((batch_sizes,))
        return ABSENT
    check = once_differentiated(world, _ROWS)
    padded = world.guarded(ops.Pad.apply, (check, data, batch_sizes, float(value), time, batch), {})
    places = world.guarded(torch.arange, (batch,), {})
    lengths = world.guarded(torch.sum, (batch_sizes.unsqueeze(1) > places, 0), {})
    return (padded.transpose(0, 1) if batch_first else padded), lengths


def _number(world: TraceWorld, tensor: torch.Tensor) -> Any:
    """Returns the number in a tensor; ``None`` if it exists only when the graph runs."""
    known = constant_value(world.tracer, tensor)
    return host_value(world, tensor) if known is None else known.item()


def is_captured(tensor: Any) -> bool:
    return type(tensor) is compat.FakeTensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
