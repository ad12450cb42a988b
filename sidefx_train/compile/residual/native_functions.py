"""Nodes of custom autograd functions whose own backward runs in a backward outside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.side_effects.custom_functions import FunctionCall

Place = tuple[Literal["input", "result", "view", "ordering", "hidden", "wrapper", "shell"], int]
"""Target of a gradient: hidden values are intermediates that do not leave the step, wrappers are tensor subclasses from
outside, shells those that leave it."""


@dataclass(frozen=True)
class Like:
    """An output that nothing uses, or that has no gradient: its node needs only its shape.

    Attributes:
        shape, dtype, device: of the tensor.
        differentiable: whether it has a gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool

    def make(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class PlannedFunction:
    """A call of a custom function whose own backward runs outside.

    Attributes:
        call: the call during the capture.
        results: positions of its outputs that are results: (output, result).
        values: for each saved tensor the position of a result without history; ``None`` for others.
    """

    call: FunctionCall
    results: tuple[tuple[int, int], ...]
    values: tuple[int | None, ...]


@dataclass(frozen=True)
class NativeFunction:
    """A call of a custom function, made again between the parts of a captured backward.

    Attributes:
        cls: the class.
        args: for each argument the location of a tensor that gets a gradient, True for another tensor, False for
            another value.
        outputs: for each output a result of the forward, (result, argument that it is), what it is like, or ``None`` if
            it is no tensor.
        single: the function returns one output, not a tuple.
        saved: locations of the saved tensors; ``None`` for no tensor.
        materializes: undefined gradients become zeros.
    """

    cls: type
    args: tuple[Place | bool, ...]
    outputs: tuple[int | tuple[int, int] | Like | None, ...]
    single: bool
    saved: tuple[Place | None, ...]
    materializes: bool

    @property
    def results(self) -> tuple[int, ...]:
        """Positions of the outputs that are results."""
        found = (each[0] if isinstance(each, tuple) else each for each in self.outputs)
        return tuple(each for each in found if isinstance(each, int))

    @property
    def targets(self) -> tuple[Place, ...]:
        """Locations of the tensors that get gradients."""
        return tuple(each for each in self.args if isinstance(each, tuple))

    def apply(self, target: Callable[[Place], Any], value: Callable[[Place], Any]) -> list[torch.Tensor]:
        """Makes the node; returns the results with it, in the order of :attr:`results`.

        Args:
            target: returns the tensor at a location, with its history.
            value: returns the tensor at a location, to save it, or as the value of an output.
        """
        args = [target(each) if isinstance(each, tuple) else _NO_GRADIENT if each else None for each in self.args]
        saved = [None if each is None else value(each) for each in self.saved]
        _running.call = self, saved, value
        try:
            made = self._apply(*args)
        finally:
            _running.call = None
        outputs = (made,) if self.single else made
        kept = (isinstance(each, (int, tuple)) for each in self.outputs)
        return [output for output, keep in zip(outputs, kept, strict=True) if keep]

    @cached_property
    def _apply(self) -> Callable[..., Any]:
        given = {"__module__": self.cls.__module__, "__qualname__": self.cls.__qualname__}
        methods = {"forward": staticmethod(_forward), "setup_context": torch.autograd.Function.setup_context}
        made = type(self.cls)(self.cls.__name__, (self.cls,), {**given, **methods})
        return compat.apply_of(made)  # type: ignore[no-any-return]


_NO_GRADIENT = torch.empty(0)
_running = threading.local()
"""What the forward of the node that a thread makes is told beside its arguments, for each of which the class's own
backward returns a gradient."""


def _forward(ctx: Any, *args: Any) -> Any:
    function, saved, value = _running.call
    made: list[Any] = []
    without_gradient: list[torch.Tensor] = []
    for output in function.outputs:
        if isinstance(output, Like):
            made.append(output.make())
            if not output.differentiable:
                without_gradient.append(made[-1])
        elif isinstance(output, tuple):
            made.append(args[output[1]])
        else:
            made.append(None if output is None else value(("result", output)))
    if saved:
        ctx.save_for_backward(*saved)
    if not function.materializes:
        ctx.set_materialize_grads(False)
    if without_gradient:
        ctx.mark_non_differentiable(*without_gradient)
    return made[0] if function.single else tuple(made)
