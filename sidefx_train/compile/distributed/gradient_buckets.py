"""Reduction of gradients in a recorded backward, as the reducer of ``DistributedDataParallel`` does it.

Each gradient, divided by the number of processes, is copied when it has been accumulated. The reduction of a bucket
starts where the last of its gradients is ready and the buckets before it have started; at the end of the backward the
results are copied to the gradients. Other ranks may run the same step eagerly: what is sent is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.strided_layout import is_dense

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@dataclass(frozen=True)
class Communication:
    """How buckets are reduced.

    Attributes:
        group: the process group.
        size: number of its processes.
        hooked: a communication hook divides the bucket, in place of the reducer.
        dtype: dtype in which a bucket is sent; ``None``: its own.
    """

    group: Any
    size: int
    hooked: bool = False
    dtype: torch.dtype | None = None


class Reduction:
    """The gradient buckets of one wrapped model in one capture.

    Args:
        world: the capturing world.
        refuse: stops the capture with a reason.
        buckets: the shadows of the parameters of each bucket.
        communication: how buckets are reduced.

    Attributes:
        expecting: a forward has prepared a reduction that has not finished.
    """

    def __init__(
        self,
        world: TraceWorld,
        refuse: Callable[[str], NoReturn],
        buckets: list[list[torch.Tensor]],
        communication: Communication,
    ) -> None:
        self._world, self._refuse = world, refuse
        self._buckets, self._how = buckets, communication
        self._ops = compat.functional_collectives()
        self.expecting = False
        self._reset()
        self._nodes: list[Any] = []  # a leaf refers to its node weakly
        self._handles: list[Any] = []
        for bucket in buckets:
            for parameter in bucket:
                node = compat.accumulator_of(parameter)
                self._handles.append(node.register_hook(self._hook(parameter)))
                self._nodes.append(node)

    def close(self) -> None:
        """Removes the hooks: through them, nodes refer to the capture, which Python's collector cannot see."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def _reset(self) -> None:
        self._ready: dict[int, torch.Tensor] = {}
        self._started: list[torch.Tensor] = []

    def prepare(self) -> None:
        """Prepares the reduction of the next backward."""
        if self.expecting and self._ready:
            self._refuse("its forward is called before the reduction of an earlier backward has finished")
        self.expecting = True
        self._reset()

    def _hook(self, parameter: torch.Tensor) -> Callable[..., None]:
        def accumulated(*_: Any) -> None:
            if self.expecting:
                with torch.no_grad():
                    self._add(parameter)

        return accumulated

    def _add(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if id(parameter) in self._ready:
            self._refuse("a gradient is accumulated twice in one reduction")
        if grad is None or grad.layout is not torch.strided or grad.requires_grad or grad.is_complex():
            self._refuse("a gradient is sparse, complex, or requires a gradient itself")
        piece = grad if self._how.hooked else grad * (1.0 / self._how.size)
        self._ready[id(parameter)] = _in_memory_order(piece, parameter)
        while len(self._started) < len(self._buckets):
            bucket = self._buckets[len(self._started)]
            if not all(id(each) in self._ready for each in bucket):
                return
            self._start(bucket)
        compat.after_backward(self._finish)

    def _start(self, bucket: list[torch.Tensor]) -> None:
        flat = torch.cat([self._ready[id(parameter)] for parameter in bucket])
        if self._how.dtype is not None:
            flat = flat.to(self._how.dtype)
        if self._how.hooked:
            flat = flat.div(self._how.size)
        self._started.append(self._ops.all_reduce(flat, "sum", self._how.group.group_name))

    def _finish(self) -> None:
        with torch.no_grad():
            for bucket, started in zip(self._buckets, self._started, strict=True):
                reduced = self._ops.wait_tensor(started).to(bucket[0].dtype)
                pieces = reduced.split([parameter.numel() for parameter in bucket])
                for parameter, piece in zip(bucket, pieces, strict=True):
                    grad = parameter.grad
                    assert grad is not None, "a gradient was removed while the backward ran"
                    grad.copy_(_like(piece, parameter))
        self.expecting = False
        self._reset()


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Returns the dimensions of a dense tensor, those with the largest strides first."""
    if not is_dense(tensor):
        return list(range(tensor.dim()))
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))


def _in_memory_order(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a gradient's elements in the order in which the parameter's are in memory."""
    return grad.permute(_memory_order(parameter)).reshape(-1)


def _like(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns elements in the order of the parameter's memory as a tensor of its shape."""
    order = _memory_order(parameter)
    shaped = piece.view([parameter.shape[dim] for dim in order])
    return shaped.permute([order.index(dim) for dim in range(parameter.dim())])
