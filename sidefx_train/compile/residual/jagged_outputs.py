"""Jagged nested tensors that leave a step: made again over their values and offsets, which are results of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.freed_history import is_freed
from sidefx_train.compile.residual.autograd_nodes import freed_result

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from sidefx_train.compile.capture.guards.source_writer import Writer
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@dataclass
class _Left:
    """A jagged tensor that leaves the step.

    Attributes:
        value: the tensor.
        cache: what is known of its rows when the forward ends; the backward may fill the cache, but makes no results.
        values: its values with their autograd history, if it has one.
    """

    value: Any
    cache: dict[str, Any]
    values: torch.Tensor | None = None


class JaggedOutputs:
    """Generates expressions for jagged tensors that the step created.

    Autograd outside of the step sees the values: they are a differentiable result of the graph, and the jagged tensor
    passes its gradient on to them.

    Args:
        world: the world of the capture.
        writer: expressions of constants.
        expression: returns code for another value.
        made: returns the ids of all values that have an expression.
    """

    def __init__(
        self,
        world: TraceWorld,
        writer: Writer,
        expression: Callable[[Any], str],
        made: Callable[[], Container[int]],
    ) -> None:
        self._world = world
        self._writer = writer
        self._expression = expression
        self._ids_made = made
        self._bases: dict[int, Any] = {}

    def made(self, value: Any) -> str:
        """Returns code for a jagged tensor, without its gradient."""
        heap = self._world.heap
        if value.is_inference():
            heap.refuse("SFX107", "a nested tensor created in inference mode leaves the step")
        history = value.grad_fn
        live = history is not None and not is_freed(self._world.freed, history)
        direct = value._is_view() and value._base is value._values
        if direct and (history is None or live):
            made = self._call(compat.view_as_jagged, self._layout(value._values, value), str(live))
            leaf = value.requires_grad and not value._base.requires_grad
            return f"{made}.requires_grad_()" if leaf else made
        if value._is_view():
            self._check_base(value)
        if live:
            layout = self._layout(self._values(value), value)
            return self._call(compat.jagged_with_history, repr(type(history).__name__), *layout)
        arguments = (*self._layout(value._values, value), str(history is None and bool(value.requires_grad)))
        if history is None:
            return self._call(compat.make_jagged, *arguments)
        maker = self._writer.constant(compat.make_jagged)
        return self._call(freed_result, repr(type(history).__name__), maker, *arguments)

    def ragged_size(self, number: torch.SymInt) -> str:
        """Returns code for the size of a ragged dimension, or a multiple of one."""
        key, coefficient = compat.parts_of_ragged_size(number)
        owner = self._expression(self._world.heap.ragged[key])
        return self._call(compat.RAGGED_SIZE_OF, owner, f"coeff={coefficient}")

    def check(self, value: torch.Tensor) -> None:
        """Refuses to let a tensor leave that is the base of a nested tensor that leaves as its copy."""
        if id(value) in self._bases:
            self._world.heap.refuse("SFX107", "a nested tensor and a view of it leave the step")

    def _check_base(self, value: Any) -> None:
        base = value._base
        if self._world.heap.record_of(base) is not None or id(base) in self._ids_made():
            self._world.heap.refuse("SFX107", "a view of a nested tensor leaves the step, and so does that tensor")
        self.check(base)
        self._bases[id(base)] = base

    def _left(self, value: Any) -> _Left:
        known = self._world.left_jagged.get(id(value))
        if known is None:
            known = self._world.left_jagged[id(value)] = _Left(value, dict(value._metadata_cache))
        return known

    def _values(self, value: Any) -> torch.Tensor:
        left = self._left(value)
        if left.values is None:
            left.values = compat.inner_values(value)
        return left.values

    def _layout(self, values: torch.Tensor, value: Any) -> tuple[str, ...]:
        """Returns code for the arguments that describe a jagged tensor, its values first."""
        write = self._expression
        cached = self._left(value).cache
        cache = ", ".join(f"{name!r}: {write(tensor)}" for name, tensor in cached.items() if tensor is not None)
        parts = (values, value._offsets, value._lengths)
        return *map(write, parts), str(value._ragged_idx), f"{{{cache}}}"

    def _call(self, fn: Any, *arguments: Any) -> str:
        flat = [part for each in arguments for part in ([each] if isinstance(each, str) else each)]
        return f"{self._writer.constant(fn)}({', '.join(flat)})"
