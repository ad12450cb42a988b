"""CTC loss (connectionist temporal classification), whose saved probabilities have a data-dependent size.

Torch's kernel returns the losses and as many columns as the longest target needs. A graph must know sizes before, so
here the number of columns is that of the longest target the batch could hold. If targets are concatenated, that would
be all of them; then nothing is saved, and the backward recomputes the losses.
"""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train.compile.ops.registration import define_operator

aten = torch.ops.aten

_FORWARD = (
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank,"
    " bool zero_infinity) -> (Tensor, Tensor)"
)
_BACKWARD = (
    "ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths,"
    " Tensor losses, Tensor saved, int blank, bool zero_infinity) -> Tensor"
)


def saved_size(log_probs: Any, targets: Any) -> tuple[Any, ...]:
    """Returns the size of what the forward saves: [batch, time, columns]."""
    return (log_probs.shape[1], log_probs.shape[0], 2 * targets.shape[1] + 1 if targets.dim() == 2 else 0)


def _forward(log_probs: Any, targets: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses, found = aten._ctc_loss.Tensor(log_probs, targets, *rest)
    saved = log_probs.new_empty(saved_size(log_probs, targets))
    if saved.numel():
        saved[..., : found.shape[-1]].copy_(found)
    return losses, saved


def _forward_fake(log_probs: Any, targets: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(saved_size(log_probs, targets))


def _backward(grad: Any, log_probs: Any, targets: Any, inputs: Any, lengths: Any, *rest: Any) -> torch.Tensor:
    losses, saved, blank, zero_infinity = rest
    given = (log_probs, targets, inputs, lengths)
    if saved.numel():
        saved = saved[..., : 2 * int(lengths.max()) + 1]
    else:
        losses, saved = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    return aten._ctc_loss_backward.Tensor(grad, *given, losses, saved, blank, zero_infinity)  # type: ignore[no-any-return]


def _backward_fake(grad: Any, log_probs: Any, *_: Any) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


define_operator(_FORWARD, _forward, _forward_fake)
define_operator(_BACKWARD, _backward, _backward_fake)


def forward(*args: Any, blank: int = 0, zero_infinity: bool = False) -> Any:
    """Replaces ``aten._ctc_loss.Tensor`` in a functional graph."""
    numbers = (*args[4:], *(blank, zero_infinity)[len(args) - 4 :])
    return torch.ops.sidefx.ctc_loss.default(*args[:4], *numbers)


def backward(*args: Any, zero_infinity: bool = False) -> Any:
    """Replaces ``aten._ctc_loss_backward.Tensor`` in a functional graph."""
    return torch.ops.sidefx.ctc_loss_backward.default(*args[:8], *(args[8:] or (zero_infinity,)))
