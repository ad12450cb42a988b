"""Packed sequences as operators of known sizes.

Torch's kernels read lengths and batch sizes on the host and choose by them what they compute: their results have sizes
that depend on data. The operators here call these kernels, with sizes as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.ops.registration import define_operator

aten = torch.ops.aten


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
