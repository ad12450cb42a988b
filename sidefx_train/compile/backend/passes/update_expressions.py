"""Writes the elementwise expression of one update of :mod:`~sidefx_train.compile.backend.passes.multi_tensor_groups`.

Takes the ``copy_`` nodes of the tensors that are written together; returns an ``Expression``, and the nodes it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from sidefx_train.compile.backend.passes.elementwise_nodes import is_tensor, literal_constant, value_of
from sidefx_train.compile.gpu.multi_tensor import Expression, Slot, Step
from sidefx_train.compile.gpu.multi_tensor.expression import Operand
from sidefx_train.compile.graph.strided_layout import is_static


@dataclass(frozen=True)
class _Place:
    """A value whose index is known when all slots are.

    Attributes:
        is_step: it is the result of a step, else a slot.
        index: which one.
    """

    is_step: bool
    index: int


class ExpressionWriter:
    """Writes the expression of one member.

    Attributes:
        leaves: what is read, in the order of the slots.
    """

    def __init__(self, inside: dict[fx.Node, tuple[str, tuple[Any, ...]]], like: torch.Tensor) -> None:
        self._inside, self._like = inside, like
        self.leaves: list[fx.Node] = []
        self._steps: list[tuple[str, tuple[Any, ...], torch.dtype]] = []
        self._places: dict[fx.Node, Operand | _Place] = {}
        self._fits = True

    def expression(self, targets: Sequence[fx.Node], shown: Sequence[fx.Node]) -> Expression | None:
        """Returns the expression; ``None`` if tensors have other layouts than the first.

        Args:
            targets: the ``copy_`` of each tensor that is written.
            shown: values that are results as well.
        """
        values = [*(value_of(target.args[0]) for target in targets), *map(value_of, shown)]
        results = [self._place(node) for node in (*(target.args[1] for target in targets), *shown)]
        if not self._fits or not all(map(self._has_its_layout, values)):
            return None
        slots = tuple(Slot(value_of(leaf).dtype, self._is_number(leaf)) for leaf in self.leaves)
        steps = tuple(Step(name, tuple(map(self._operand, given)), dtype) for name, given, dtype in self._steps)
        return Expression(slots, steps, tuple(map(self._operand, results)), tuple(value.dtype for value in values))

    def _place(self, argument: Any) -> Operand | _Place:
        if not isinstance(argument, fx.Node):
            return str(argument)  # a literal
        if argument not in self._places:
            self._places[argument] = self._placed(argument)
        return self._places[argument]

    def _placed(self, node: fx.Node) -> Operand | _Place:
        constant = literal_constant(node)
        if constant is not None:
            return constant
        if node not in self._inside:
            self._fits &= is_tensor(node) and (self._is_number(node) or self._has_its_layout(value_of(node)))
            self.leaves.append(node)
            return _Place(False, len(self.leaves) - 1)
        name, arguments = self._inside[node]
        given = tuple(self._place(each) for each in arguments)
        dtype = value_of(node).dtype
        if name == "cast" and self._dtype(given[0]) == dtype:
            return given[0]
        self._steps.append((name, given, dtype))
        return _Place(True, len(self._steps) - 1)

    def _dtype(self, place: Operand | _Place) -> torch.dtype | None:
        if not isinstance(place, _Place):
            return None
        return self._steps[place.index][2] if place.is_step else value_of(self.leaves[place.index]).dtype

    def _operand(self, place: Operand | _Place) -> Operand:
        if isinstance(place, _Place):
            return place.index + len(self.leaves) * place.is_step
        return place

    def _is_number(self, node: fx.Node) -> bool:
        return not value_of(node).dim() and bool(self._like.dim())

    def _has_its_layout(self, value: torch.Tensor) -> bool:
        if value.device != self._like.device or value.shape != self._like.shape or not is_static(value):
            return False
        pairs = zip(value.shape, value.stride(), self._like.stride(), strict=True)
        return all(size == 1 or one == other for size, one, other in pairs)
