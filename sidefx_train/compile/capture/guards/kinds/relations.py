"""Guards that compare several objects, and conditions on symbolic numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import Guard, NumberCondition
from sidefx_train.compile.capture.guards.kinds.base import Arguments, Instruction, Kind, register
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.guards.symbol_guards import CONDITION_NAMES


@register("all_distinct")
class AllDistinct(Kind):
    """Several sources give different objects."""

    phase = "relation"
    native = True

    def describe(self, guard: Guard) -> str:
        return f"{', '.join(source.label for source in guard.value)} are different objects"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        return f"len({{{_ids(writer, guard.value)}}}) != {len(guard.value)}"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return len({id(source.fetch(*arguments)) for source in guard.value}) != len(guard.value), "one object twice"

    def others(self, guard: Guard) -> tuple[Source, ...]:
        return guard.value  # type: ignore[no-any-return]

    def instruction(self, guard: Guard) -> Instruction:
        return "distinct", None, 0


@register("disjoint_sets")
class DisjointSets(Kind):
    """None of some objects is one of some others."""

    phase = "relation"
    native = True

    def describe(self, guard: Guard) -> str:
        ones, others = (", ".join(source.label for source in sources) for sources in guard.value)
        return f"none of {ones} is one of {others}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        ones, others = (_ids(writer, sources) for sources in guard.value)
        return f"not {{{ones}}}.isdisjoint(({others},))"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        ones, others = ({id(source.fetch(*arguments)) for source in sources} for sources in guard.value)
        return not ones.isdisjoint(others), "one object in both"

    def others(self, guard: Guard) -> tuple[Source, ...]:
        return (*guard.value[0], *guard.value[1])

    def instruction(self, guard: Guard) -> Instruction:
        return "distinct", None, len(guard.value[0])


@register("apart")
class Apart(Kind):
    """A NumPy array has no memory in common with some tensors."""

    phase = "relation"

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} shares no memory with a tensor that the step writes to"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        tensors = ", ".join(map(writer.value, guard.value))
        return f"{writer.constant(overlaps)}({writer.value(guard.source)}, ({tensors},))"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return overlaps(value, [source.fetch(*arguments) for source in guard.value]), "shared memory"

    def others(self, guard: Guard) -> tuple[Source, ...]:
        return guard.value  # type: ignore[no-any-return]


@register("number")
class Number(Kind):
    """A condition on symbolic numbers holds: a :class:`NumberCondition`."""

    phase = "relation"

    def describe(self, guard: Guard) -> str:
        return str(guard.value)

    def python_test(self, writer: Writer, guard: Guard) -> str:
        condition: NumberCondition = guard.value
        writer.names.update(CONDITION_NAMES)
        code = condition.code
        for name, source in condition.names:
            code = re.sub(rf"\b{name}\b", writer.value(source), code)
        return f"not ({code})"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        condition: NumberCondition = guard.value
        names = {name: source.fetch(*arguments) for name, source in condition.names}
        held = bool(eval(condition.code, dict(CONDITION_NAMES), names))
        return not held, ", ".join(f"{source.label} = {names[name]!r}" for name, source in condition.names)

    def others(self, guard: Guard) -> tuple[Source, ...]:
        return tuple(source for _, source in guard.value.names)


def overlaps(array: np.ndarray[Any, Any], tensors: Iterable[torch.Tensor]) -> bool:
    """Returns True if an array has memory in common with the storage of one of the tensors."""
    begin, end = _memory(array)
    for tensor in tensors:
        place = compat.storage_address(tensor)
        if place < end and begin < place + tensor.untyped_storage().nbytes():
            return True
    return False


def _memory(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Returns the addresses between which an array has its elements."""
    begin = end = int(array.__array_interface__["data"][0])
    if array.size == 0:
        return begin, begin
    for size, stride in zip(array.shape, array.strides, strict=True):
        begin, end = begin + min(0, stride * (size - 1)), end + max(0, stride * (size - 1))
    return begin, end + array.itemsize


def _ids(writer: Writer, sources: tuple[Source, ...]) -> str:
    return ", ".join(f"id({writer.value(source)})" for source in sources)
