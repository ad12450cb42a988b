"""Functions of tensors of symbolic lengths, for which torch's C++ code asks for numbers.

It composes ``pad_sequence`` of the lengths, and the derivative of ``cumprod``. Inductor compiles no view of a length
that only the graph knows; it takes one for the size of an operator's result, so such slices are copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.ops.registration import define_operator


def _pad(sequences: list[torch.Tensor], batch_first: bool, value: float, left: bool, _: int) -> torch.Tensor:
    return compat.pad_list(sequences, batch_first, value, "left" if left else "right")  # type: ignore[no-any-return]


def _pad_fake(sequences: list[torch.Tensor], batch_first: bool, value: float, left: bool, longest: int) -> torch.Tensor:
    sizes = (len(sequences), longest) if batch_first else (longest, len(sequences))
    return sequences[0].new_empty(*sizes, *sequences[0].shape[1:])


def _unpad(grad: torch.Tensor, lengths: list[int], batch_first: bool, left: bool) -> list[torch.Tensor]:
    rows = grad.unbind(0 if batch_first else 1)
    starts = (grad.shape[1 if batch_first else 0] - length if left else 0 for length in lengths)
    return [row.narrow(0, *place).clone() for row, *place in zip(rows, starts, lengths, strict=True)]


def _unpad_fake(grad: torch.Tensor, lengths: list[int], batch_first: bool, left: bool) -> list[torch.Tensor]:
    return [grad.new_empty(length, *grad.shape[2:]) for length in lengths]


define_operator(
    "pad_sequence(Tensor[] sequences, bool batch_first, float value, bool left, SymInt longest) -> Tensor",
    _pad,
    _pad_fake,
)
define_operator(
    "unpad_sequence(Tensor grad, SymInt[] lengths, bool batch_first, bool left) -> Tensor[]", _unpad, _unpad_fake
)


class PadSequence(torch.autograd.Function):
    """Stacks sequences, filled up to one length: ``apply(batch_first, value, left, *sequences)``."""

    @staticmethod
    def forward(ctx: Any, batch_first: bool, value: float, left: bool, *sequences: Any) -> Any:
        """Returns the padded sequences."""
        ctx.lengths, ctx.layout = [each.shape[0] for each in sequences], (batch_first, left)
        longest = ctx.lengths[0]
        for length in ctx.lengths[1:]:
            longest = torch.sym_max(longest, length)
        return torch.ops.sidefx.pad_sequence.default(list(sequences), batch_first, value, left, longest)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradients of the sequences."""
        return None, None, None, *UnpadSequence.apply(grad, ctx.lengths, *ctx.layout)


class UnpadSequence(torch.autograd.Function):
    """Takes the sequences from a padded batch: ``apply(padded, lengths, batch_first, left)``."""

    @staticmethod
    def forward(ctx: Any, padded: Any, lengths: list[Any], batch_first: bool, left: bool) -> Any:
        """Returns the sequences."""
        ctx.layout = batch_first, left
        return tuple(torch.ops.sidefx.unpad_sequence.default(padded, lengths, batch_first, left))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Returns the gradient of the batch."""
        batch_first, left = ctx.layout
        return PadSequence.apply(batch_first, 0.0, left, *grads), None, None, None


class Cumprod(torch.autograd.Function):
    """Product of the elements up to each: ``apply(check, input, dim)``."""

    @staticmethod
    def forward(ctx: Any, check: Callable[[], None], input: Any, dim: int) -> Any:
        """Returns the products."""
        made = torch.cumprod(input, dim)
        ctx.check, ctx.dim = check, dim
        ctx.save_for_backward(input, made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradient of the input, by the operations of torch's ``cumprod_backward``."""
        ctx.check()
        dim, (x, made) = ctx.dim, ctx.saved_tensors
        weighted = made * grad
        zeros_before = (x == 0).cumsum(dim)

        # Up to the first zero: no factor is zero.
        before = zeros_before == 0
        sums = weighted.masked_fill(before.logical_not(), 0.0).flip(dim).cumsum(dim).flip(dim)
        found = torch.where(before, sums / x, torch.zeros_like(x))

        # At the first zero: the other factors are those before it and those between it and the second.
        between = zeros_before == 1
        first = between.max(dim, keepdim=True).indices
        is_first = torch.zeros_like(between).scatter_(dim, first, 1).logical_and_(between)
        behind = x.masked_fill((between & is_first.logical_not()).logical_not(), 1.0).cumprod(dim)
        of_rest = (behind * grad.masked_fill(zeros_before != 1, 0.0)).sum(dim, keepdim=True)
        ahead = made.gather(dim, (first - 1).relu_()).masked_fill_(first == 0, 1.0)
        return None, torch.where(is_first, of_rest * ahead, found), None


def _slice(x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _slice_fake(x: torch.Tensor, dim: int, start: Any, length: Any) -> torch.Tensor:
    return x.new_empty([*x.shape[:dim], length, *x.shape[dim + 1 :]])


define_operator(
    "copied_slice(Tensor x, int dim, SymInt start, SymInt length) -> Tensor",
    _slice,
    _slice_fake,
    key="CompositeExplicitAutograd",
)


def _slice_gradient(grad: torch.Tensor, size: list[int], dim: int, start: int) -> torch.Tensor:
    made = grad.new_zeros(size)
    made.narrow(dim, start, grad.shape[dim]).copy_(grad)
    return made


define_operator(
    "copied_slice_backward(Tensor grad, SymInt[] size, int dim, SymInt start) -> Tensor",
    _slice_gradient,
    lambda grad, size, dim, start: grad.new_empty(size),
    key="CompositeExplicitAutograd",
)

IS_INSIDE = "is_inside"
"""Key in the ``meta`` of a node that computes the end of a slice: neither it nor the start is outside of the tensor."""

SLICE = torch.ops.sidefx.copied_slice.default
SLICE_BACKWARD = torch.ops.sidefx.copied_slice_backward.default
