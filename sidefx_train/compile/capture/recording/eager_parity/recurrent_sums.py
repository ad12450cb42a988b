"""Gradients that the backward of a recurrent layer sums over time, added to those that a tensor has before.

Eager adds the gradient of each time to the engine's buffer, one by one. One operator computes them here, so it takes
what the buffer has at that time, and its results replace the engine's sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.distributed_models import refuse_whole

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.interfaces import GraphRecorder

_ADD = torch.ops.aten.add.Tensor


class RecurrentSums:
    """The sums over time of the recurrent layer whose backward has run last.

    Attributes:
        in_step: the backward is the step's own; one that is recorded after the forward passes its gradients to the
            engine outside.
    """

    def __init__(self, tracer: GraphRecorder) -> None:
        self.in_step = True
        self._tracer = tracer
        self._node: tuple[str, int] | None = None
        self._sums: dict[int, torch.Tensor] = {}

    @contextmanager
    def of_backward_outside(self) -> Iterator[None]:
        """While it runs, gradients are recorded for the engine outside."""
        before, self.in_step = self.in_step, False
        try:
            yield
        finally:
            self.in_step = before

    def note(self, grads: Sequence[torch.Tensor | None], summed: Sequence[bool]) -> None:
        """Notes the results of ``sidefx::recurrent_layer_backward``, inside the backward that calls it.

        Args:
            grads: the gradients, which are its results or absent.
            summed: for each, True if it is a sum over time.
        """
        self._node = compat.running_derivative()
        self._sums = {id(g): g for g, is_sum in zip(grads, summed, strict=True) if is_sum and g is not None}

    def concerns(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Returns True for the engine's addition of such a sum to its buffer."""
        if not self._sums or func is not _ADD or len(args) != 2 or id(args[1]) not in self._sums:
            return False
        return compat.running_derivative() == self._node

    def join(self, before: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Has the operator begin a sum with what the buffer has.

        Args:
            before: contents of the buffer.
            grad: the sum over time; it becomes that of both.

        Raises:
            Unsupported: two sums of one layer belong to one tensor.
        """
        result = self._tracer.node_of(grad)
        operator, place = result.args
        assert isinstance(operator, fx.Node), "the operator returns a list"
        earlier = self._tracer.node_of(before)
        if earlier.args[:1] == (operator,):
            reason = "two weights of a recurrent layer for changing lengths are one tensor"
            refuse_whole("SFX102", reason, self._tracer.locate())
        sums = list(operator.args[-1])
        sums[place] = earlier
        operator.args = (*operator.args[:-1], sums)
        return grad
