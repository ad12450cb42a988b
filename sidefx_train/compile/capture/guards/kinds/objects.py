"""Guards on one object: its identity, value, type, attributes and definition."""

from __future__ import annotations

from typing import Any

import numpy as np

from sidefx_train.compile.capture.guards.definition_guards import FunctionFacts, NamespaceFacts
from sidefx_train.compile.capture.guards.guard import SHOWN_EXACTLY, Guard, class_name, same_value, shown
from sidefx_train.compile.capture.guards.kinds.base import Arguments, Instruction, Kind, register, target
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.interpreter.generator_finalizers import runs_code_when_freed
from sidefx_train.compile.common.plain_values import DERIVED_FROM, exact_value, is_set
from sidefx_train.compile.common.positioned_iterators import exposes_position
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import descriptor_of


@register("is")
class Is(Kind):
    """The value is this object."""

    native = True

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} is {shown(guard.value)}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        return f"{target(writer, guard)} is not {writer.constant(guard.value, guard.source.label)}"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return value is not guard.value, value


@register("same")
class Same(Kind):
    """The value is the object that another source gives."""

    native = True

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} is {guard.value.label}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        return f"{target(writer, guard)} is not {writer.value(guard.value)}"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return value is not guard.value.fetch(*arguments), value

    def others(self, guard: Guard) -> tuple[Source, ...]:
        return (guard.value,)


@register("equal")
class Equal(Kind):
    """The value has this type and equals this value."""

    native = True

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} == {shown(guard.value)}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        value = writer.value(guard.source)
        expected = writer.constant(guard.value, guard.source.label)
        inexact = issubclass(type(guard.value), (tuple, frozenset, *SHOWN_EXACTLY, np.generic))
        if inexact and not is_simple(guard.value):  # equal values of these types need not be the same
            return f"not {writer.constant(same_value)}({value}, {expected})"
        # The class first: what is there now may be a tensor, or compare itself in Python.
        return f"type({value}) is not {writer.constant(type(guard.value))} or {value} != {expected}"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return not same_value(value, guard.value), value


@register("value")
class Value(Kind):
    """An instance of a class derived from a builtin number or text is this number or text."""

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} == {shown(guard.value)}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        exact = f"{writer.constant(exact_value)}({writer.value(guard.source)})"
        return f"not {writer.constant(same_value)}({exact}, {writer.constant(guard.value, guard.source.label)})"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return not isinstance(value, DERIVED_FROM) or not same_value(exact_value(value), guard.value), value


@register("type")
class Type(Kind):
    """The value has exactly this class."""

    native = True

    def describe(self, guard: Guard) -> str:
        return f"type({guard.source.label}) is {class_name(guard.value)}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        return f"type({writer.value(guard.source)}) is not {writer.constant(guard.value)}"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return type(value) is not guard.value, type(value)


@register("absent")
class Absent(Kind):
    """The instance ``__dict__`` of the value has no entry of this name."""

    native = True

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} has no {shown(guard.value)}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        return f"{writer.constant(guard.value)} in {writer.space(guard.source)}"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        entries = object.__getattribute__(value, "__dict__")
        return guard.value in entries, entries.get(guard.value)


@register("unset_slot")
class UnsetSlot(Kind):
    """The slot of this name has no value."""

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label}.{guard.value} is not set"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        return f"{writer.constant(is_set)}({writer.value(guard.source)}, {writer.constant(guard.value)})"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return is_set(value, guard.value), value


@register("empty_cell")
class EmptyCell(Kind):
    """The closure cell has no contents."""

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} is unbound"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        return f"{writer.constant(cell_is_set)}({writer.value(guard.source)})"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return cell_is_set(value), value


@register("method")
class Method(Kind):
    """The value is a bound method written in C, made from this descriptor."""

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} is {guard.value.__qualname__} of its object"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        descriptor = writer.constant(guard.value, "descriptor")
        return f"{writer.constant(descriptor_of)}({writer.value(guard.source)}) is not {descriptor}"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return descriptor_of(value) is not guard.value, value


class _Answer(Kind):
    """A function of the value gives the same answer.

    Attributes:
        function: called with the value.
        other: what a value with the other answer is.
    """

    function: staticmethod[[Any], bool]
    other: str

    def python_test(self, writer: Writer, guard: Guard) -> str:
        return f"{writer.constant(self.function)}({writer.value(guard.source)}) is not {guard.value}"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return self.function(value) is not guard.value, self.other


@register("runs_code_when_freed")
class RunsCodeWhenFreed(_Answer):
    """The object would run code of the program if it were finalized now, or would not."""

    function = staticmethod(runs_code_when_freed)
    other = "suspended elsewhere or of another class"

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} {'runs' if guard.value else 'does not run'} code when it is freed"


@register("exposes_position")
class ExposesPosition(_Answer):
    """The iterator has a position, and alone advances the iterators that it wraps."""

    function = staticmethod(exposes_position)
    other = "another iterator, or other code advances what it wraps"

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} has the iterators that it wraps for itself"


class _Definition(Kind):
    """What is compared says itself whether it holds, and what has changed."""

    native = True

    def python_test(self, writer: Writer, guard: Guard) -> str:
        return f"not {writer.constant(guard.value.holds, guard.kind)}({writer.value(guard.source)})"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        changed = guard.value.changed(value)
        return bool(changed), changed


@register("names")
class Names(_Definition):
    """Names of a module or class give what they gave: a :class:`NamespaceFacts`."""

    def describe(self, guard: Guard) -> str:
        return f"{len(guard.value.names)} names of {guard.source.label} are unchanged"

    def instruction(self, guard: Guard) -> Instruction:
        facts: NamespaceFacts = guard.value
        return "names", (facts.mro, facts.names, facts.values, ABSENT), -1


@register("code")
class Code(_Definition):
    """A function has the code and defaults that it had: a :class:`FunctionFacts`."""

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} has the same code and defaults"

    def instruction(self, guard: Guard) -> Instruction:
        facts: FunctionFacts = guard.value
        return "code", (facts.code, facts.defaults, facts.named, facts.entries), -1


def is_simple(value: Any) -> bool:
    """True for a number that equals nothing but itself among numbers of its type, and for tuples of text."""
    if type(value) is tuple:
        return all(type(item) is str for item in value)
    return type(value) is float and value != 0 and value == value


def cell_is_set(cell: Any) -> bool:
    """True if a closure cell has contents."""
    try:
        cell.cell_contents  # noqa: B018 - the access is the test
    except ValueError:
        return False
    return True
