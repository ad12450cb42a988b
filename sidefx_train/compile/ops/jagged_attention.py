"""Attention of jagged nested tensors on the CPU as an operator of dense tensors.

Torch computes it by nested tensors of another layout, which cannot be recorded: their sizes are in memory. The operator
runs the same code. Autograd records it within the operator, and the backward's operator runs what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.ops.recorded_forwards import Recorded, copy_of, key_of, recorded_by
from sidefx_train.compile.ops.registration import define_operator

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor query_offsets, Tensor key_offsets, Tensor value_offsets"


def _strided(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    rows = values.split(offsets.diff().tolist())
    nested = torch.nested.as_nested_tensor(list(rows))
    return nested.transpose(1, 2).contiguous()


def _attend(tensors: tuple[Any, ...], scale: float) -> torch.Tensor:
    query, key, value = map(_strided, tensors[:3], tensors[3:])
    made = compat.attention_of_rows(query, key, value, scale).transpose(1, 2).contiguous().values()
    return made.view(-1, tensors[0].shape[1], tensors[2].shape[2])


def _record(tensors: tuple[Any, ...], wanted: list[bool], scale: float) -> Recorded:
    leaves = [copy_of(t).requires_grad_(needed) for t, needed in zip(tensors, wanted, strict=False)]
    made = _attend((*leaves, *tensors[3:]), scale)
    return Recorded([leaf for leaf in leaves if leaf.requires_grad], (made,))


def _forward(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *tensors, scale, wanted = given
    if not any(wanted):
        with compat.recording_autograd(), torch.no_grad():
            return _attend(tuple(tensors), scale), torch.zeros(1, dtype=torch.uint8)
    with compat.recording_autograd():
        recorded = _record(tuple(tensors), wanted, scale)
    return compat.alias_hidden_from_autograd(recorded.results[0]), key_of(recorded)


def _forward_fake(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    query, value = given[0], given[2]
    return query.new_empty(*query.shape[:2], value.shape[2]), query.new_empty(1, dtype=torch.uint8)


def _backward(*given: Any) -> tuple[torch.Tensor, ...]:
    """Returns three gradients, empty ones where none is wanted: Inductor takes a list of one tensor for the tensor."""
    *tensors, scale, wanted, record, grad = given
    recorded = recorded_by(record)
    with compat.recording_autograd():
        if recorded is None:
            recorded = _record(tuple(tensors), wanted, scale)
        found = iter(torch.autograd.grad(recorded.results, recorded.leaves, grad))
    return tuple(next(found) if needed else grad.new_empty(0) for needed in wanted)


def _backward_fake(*given: Any) -> tuple[torch.Tensor, ...]:
    return tuple(t.new_empty(t.shape if needed else (0,)) for t, needed in zip(given[:3], given[7], strict=True))


define_operator(
    f"jagged_attention({_TENSORS}, float scale, bool[] wanted) -> (Tensor, Tensor)", _forward, _forward_fake
)
define_operator(
    f"jagged_attention_backward({_TENSORS}, float scale, bool[] wanted, Tensor record, Tensor grad)"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    differentiable=False,
)


class JaggedAttention(torch.autograd.Function):
    """Attention within rows: ``apply(check, query, key, value, query_offsets, key_offsets, value_offsets, scale)``.

    The values have the shape (elements of all rows, heads, size of a head).
    """

    @staticmethod
    def forward(ctx: Any, check: Callable[[], None], *given: Any) -> Any:
        """Returns the values of the result."""
        ctx.check, ctx.scale, ctx.wanted = check, given[6], list(ctx.needs_input_grad[1:4])
        made, record = torch.ops.sidefx.jagged_attention.default(*given, ctx.wanted)
        ctx.save_for_backward(*given[:6], record)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradients of the tensors."""
        ctx.check()
        *tensors, record = ctx.saved_tensors
        given = (*tensors, ctx.scale, ctx.wanted, record, grad)
        found = torch.ops.sidefx.jagged_attention_backward.default(*given)
        grads = (each if needed else None for each, needed in zip(found, ctx.wanted, strict=True))
        return None, *grads, None, None, None, None
