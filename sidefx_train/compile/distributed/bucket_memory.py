"""Memory of gradient buckets: the order of their elements, and gradients that are views of them.

With ``gradient_as_bucket_view=True`` the gradients of a bucket are views of one tensor, the same objects in every step.
Where a step finds them at its beginning, it writes into them. Otherwise the capture's bucket is a tensor of its own,
which must not leave the step: outside it would be another object than eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.strided_layout import is_dense


@dataclass(eq=False)
class Variable:
    """A parameter in one capture.

    Attributes:
        index: its position among the parameters of the reducer.
        parameter: its shadow.
        piece: its gradient as it is sent, once it is ready.
        used: its gradient was accumulated since the forward.
    """

    index: int
    parameter: torch.Tensor
    piece: torch.Tensor | None = None
    used: bool = False

    def reset(self) -> None:
        """Forgets a reduction."""
        self.piece, self.used = None, False


class BucketMemory:
    """The gradients of all buckets as views.

    Args:
        buckets: the parameters of each bucket, and the views that the step found at its beginning.
        refuse: stops the capture with a reason.
        private: gets the storages that must not leave the step.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[list[Variable], list[torch.Tensor] | None]],
        refuse: Callable[[str], NoReturn],
        private: dict[int, Callable[[], NoReturn]],
    ) -> None:
        self._refuse, self._private = refuse, private
        self._bucket_of = {variable: bucket for bucket, _ in buckets for variable in bucket}
        self._views: dict[Variable, torch.Tensor] = {}
        for bucket, found in buckets:
            if found is not None:
                self._views.update(zip(bucket, found, strict=True))

    def _view(self, variable: Variable) -> torch.Tensor:
        if variable not in self._views:
            bucket = self._bucket_of[variable]
            first = bucket[0].parameter.detach()
            flat = first.new_empty(sum(each.parameter.numel() for each in bucket))
            self._private[compat.storage_id(flat)] = self._leaves
            offset = 0
            for each in bucket:
                parameter = each.parameter
                self._views[each] = flat.as_strided(parameter.shape, _strides(parameter), offset)
                offset += parameter.numel()
        return self._views[variable]

    def _leaves(self) -> NoReturn:
        self._refuse("gradients are views of buckets, and the step leaves some that it did not find at its beginning")

    def filled(self, variable: Variable, divisor: int | None) -> torch.Tensor:
        """Moves a gradient into its bucket, which it is a view of from then on; returns its elements.

        Args:
            variable: the parameter.
            divisor: divides the gradient.
        """
        parameter, view = variable.parameter, self._view(variable)
        grad = parameter.grad
        if grad is None:
            view.zero_()
        elif compat.storage_id(grad) != compat.storage_id(view):
            view.copy_(grad if divisor is None else grad * (1.0 / divisor))
            parameter.grad = view
        elif divisor is not None:
            view.div_(divisor)
        return in_memory_order(view, parameter).clone()

    def write(self, variable: Variable, value: torch.Tensor) -> None:
        """Writes a reduced gradient into the bucket."""
        view, grad = self._view(variable), variable.parameter.grad
        if grad is None or compat.storage_id(grad) != compat.storage_id(view):
            self._refuse("a gradient was replaced while the backward ran")
        view.copy_(value)


def found_views(parameters: Sequence[torch.Tensor]) -> bool:
    """Returns True if the gradients of a bucket's parameters are the views of one bucket.

    It is called by guards. What they refer to must not contain weak references, which the garbage collector ends: to
    it, what is only held by an entry is garbage.
    """
    offset, base = 0, None
    for parameter in parameters:
        grad = parameter.grad
        if grad is None or grad._base is None or (base is not None and grad._base is not base):
            return False
        if grad.storage_offset() != offset or grad.stride() != _strides(parameter) or grad.shape != parameter.shape:
            return False
        offset, base = offset + parameter.numel(), grad._base
    return base is not None and base.dim() == 1 and base.numel() == offset


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    if is_dense(parameter):
        return tuple(parameter.stride())
    strides, size = [], 1
    for length in reversed(parameter.shape):
        strides.append(size)
        size *= length
    return tuple(reversed(strides))


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Returns the dimensions of a dense tensor, those with the largest strides first."""
    if not is_dense(tensor):
        return list(range(tensor.dim()))
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))


def in_memory_order(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a gradient's elements in the order in which the parameter's are in memory."""
    return grad.permute(_memory_order(parameter)).reshape(-1)


def like(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns elements in the order of the parameter's memory as a tensor of its shape."""
    order = _memory_order(parameter)
    shaped = piece.view([parameter.shape[dim] for dim in order])
    return shaped.permute([order.index(dim) for dim in range(parameter.dim())])
