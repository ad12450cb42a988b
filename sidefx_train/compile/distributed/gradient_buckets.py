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
from sidefx_train.compile.distributed.bucket_memory import BucketMemory, Variable, in_memory_order, like
from sidefx_train.errors import Unsupported

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
        finds_unused: every forward finds the parameters that take no part, and processes exchange what they used.
        as_views: gradients are views of buckets.
        outside: some parameters are not known, so the real reducer must reduce all gradients.
    """

    group: Any
    size: int
    hooked: bool = False
    dtype: torch.dtype | None = None
    finds_unused: bool = False
    as_views: bool = False
    outside: bool = False


class Reduction:
    """The gradient buckets of one wrapped model in one capture.

    Args:
        world: the capturing world.
        refuse: stops the capture with a reason.
        buckets: the parameters of each bucket.
        communication: how buckets are reduced.
        memory: the memory of the buckets, if gradients are views of them.
        reducer: the real reducer.

    Attributes:
        expecting: a forward has prepared a reduction that has not finished.
    """

    def __init__(
        self,
        world: TraceWorld,
        refuse: Callable[[str], NoReturn],
        buckets: list[list[Variable]],
        communication: Communication,
        memory: BucketMemory | None,
        reducer: Any,
    ) -> None:
        self._world, self._refuse, self._reducer = world, refuse, reducer
        self._buckets, self._how, self._memory = buckets, communication, memory
        self._ops = compat.functional_collectives()
        self.expecting = False
        self._started: list[torch.Tensor] = []
        self._used: Any = None
        self._unused: list[Variable] = []
        self._unsynchronized: dict[Variable, None] = {}
        self._nodes: list[Any] = []  # a leaf refers to its node weakly
        self._handles: list[Any] = []
        for variable in self.variables():
            node = compat.accumulator_of(variable.parameter)
            self._handles.append(node.register_hook(self._hook(variable)))
            self._nodes.append(node)

    def variables(self) -> list[Variable]:
        """Returns the parameters of all buckets."""
        return [variable for bucket in self._buckets for variable in bucket]

    @property
    def has_begun(self) -> bool:
        """Returns True if a gradient is ready in the reduction that is expected."""
        return any(variable.piece is not None for variable in self.variables())

    def leave(self) -> None:
        """Leaves the reduction that is expected to the real reducer."""
        self.expecting = False
        self.close()

    def close(self) -> None:
        """Removes the hooks: through them, nodes refer to the capture, which Python's collector cannot see."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def _reset(self) -> None:
        for variable in self.variables():
            variable.reset()
        self._started = []

    def prepare(self, unused: list[Variable]) -> None:
        """Prepares the reduction of the next backward.

        Args:
            unused: parameters that take no part in it.
        """
        if self.expecting and self.has_begun:
            self._refuse("its forward is called before the reduction of an earlier backward has finished")
        self.expecting, self._unused = True, unused
        self._reset()

    def _hook(self, variable: Variable) -> Callable[..., None]:
        def accumulated(*_: Any) -> None:
            with torch.no_grad():
                if self.expecting and self._how.outside:
                    self._refuse("the step is divided in its forward, and this part has a backward of its own")
                elif self.expecting:
                    self._accumulated(variable)
                elif self._how.finds_unused and variable.parameter.grad is not None:
                    self._unsynchronized[variable] = None

        return accumulated

    def _accumulated(self, variable: Variable) -> None:
        variable.used = variable.parameter.grad is not None
        if not variable.used and not self._how.finds_unused:
            self._refuse("a gradient is undefined")
        ready, self._unused = [*self._unused, variable], []
        for each in ready:
            self._add(each)

    def _add(self, variable: Variable) -> None:
        """Takes a gradient that is ready; starts the buckets that are complete then."""
        if variable.piece is not None:
            self._refuse("a gradient is accumulated twice in one reduction")
        variable.piece = self._piece(variable)
        while len(self._started) < len(self._buckets):
            bucket = self._buckets[len(self._started)]
            if any(each.piece is None for each in bucket):
                return
            self._start(bucket)
        if self._how.finds_unused:
            self._exchange_used()
        compat.after_backward(self._finish)

    def _piece(self, variable: Variable) -> torch.Tensor:
        """Returns a parameter's part of its bucket."""
        parameter = variable.parameter
        self._world.heap.read_grad(parameter)
        grad = parameter.grad
        if grad is not None and (grad.layout is not torch.strided or grad.requires_grad or grad.is_complex()):
            self._refuse("a gradient is sparse, complex, or requires a gradient itself")
        if self._memory is not None:
            return self._memory.filled(variable, None if self._how.hooked else self._how.size)
        if grad is None:
            return parameter.detach().new_zeros(parameter.numel())
        return in_memory_order(grad if self._how.hooked else grad * (1.0 / self._how.size), parameter)

    def _start(self, bucket: list[Variable]) -> None:
        flat = torch.cat([each.piece for each in bucket if each.piece is not None])
        if self._how.dtype is not None:
            flat = flat.to(self._how.dtype)
        if self._how.hooked:
            flat = flat.div(self._how.size)
        self._started.append(self._ops.all_reduce(flat, "sum", self._how.group.group_name))

    def _exchange_used(self) -> None:
        """Starts the sum over all processes of which parameters each has used."""
        for variable in self._unsynchronized:
            if variable.parameter.grad is None:
                self._refuse("gradients of a backward under no_sync() are removed in the same step")
            variable.used = True
        used = {variable.index: variable.used for variable in self.variables()}
        flags = torch.tensor([int(used[index]) for index in sorted(used)], dtype=torch.int32)
        self._used = self._ops.all_reduce(flags, "sum", self._how.group.group_name)

    def _finish(self) -> None:
        undecided: list[tuple[Variable, torch.Tensor]] = []
        with torch.no_grad():
            for bucket, started in zip(self._buckets, self._started, strict=True):
                reduced = self._ops.wait_tensor(started).to(bucket[0].parameter.dtype)
                pieces = reduced.split([each.parameter.numel() for each in bucket])
                for variable, piece in zip(bucket, pieces, strict=True):
                    if variable.used:
                        self._write(variable, like(piece, variable.parameter))
                    elif self._how.finds_unused:
                        undecided.append((variable, like(piece, variable.parameter)))
            if self._how.finds_unused:
                self._finish_unused(undecided, self._ops.wait_tensor(self._used))
        self.expecting = False
        self._reset()

    def _write(self, variable: Variable, value: torch.Tensor) -> None:
        """Writes a reduced gradient."""
        if self._memory is not None:
            self._memory.write(variable, value)
            return
        grad = variable.parameter.grad
        assert grad is not None, "a gradient was removed while the backward ran"
        grad.copy_(value)

    def _finish_unused(self, undecided: list[tuple[Variable, torch.Tensor]], used: torch.Tensor) -> None:
        """Finishes gradients of parameters that this process has not used: they change where another has."""
        missing: list[tuple[Variable, torch.Tensor]] = []
        for variable, value in undecided:
            grad = variable.parameter.grad
            if self._memory is not None:
                self._refuse("gradients are views of buckets, and a parameter takes no part in its forward")
            if grad is None:
                missing.append((variable, value))
            else:
                grad.copy_(torch.where(used[variable.index] > 0, value, grad))
        self._unsynchronized.clear()
        self._world.defer(compat.reset_used, (self._reducer,), {})
        if missing:
            parameters = tuple(variable.parameter for variable, _ in missing)
            counts = torch.stack([used[variable.index] for variable, _ in missing])
            self._world.defer(set_gradients, (parameters, tuple(value for _, value in missing), counts), {})
            self._world.interp.stop_after(Unsupported(_DEPENDS, _ON_OTHERS))

    def end(self) -> None:
        """Tells the real reducer, after the step, what it used in a backward without reduction."""
        if self._unsynchronized:
            if any(variable.parameter.grad is None for variable in self._unsynchronized):
                self._refuse("gradients of a backward under no_sync() are removed in the same step")
            indices = tuple(variable.index for variable in self._unsynchronized)
            self._world.defer(compat.mark_used, (self._reducer, indices), {})


_DEPENDS = "SFX106"
_ON_OTHERS = "a parameter takes no part in the backward: whether it has a gradient depends on the other processes"


def set_gradients(parameters: tuple[Any, ...], values: tuple[torch.Tensor, ...], counts: torch.Tensor) -> None:
    """Sets the gradients of parameters that another process has used, after the graph.

    Args:
        parameters: parameters without a gradient.
        values: their reduced gradients.
        counts: how many processes have used each.
    """
    for parameter, value, count in zip(parameters, values, counts.tolist(), strict=True):
        if count:
            parameter.grad = value.clone()
