"""What a guard kind says of itself, and the registry of kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from sidefx_train.compile.capture.guards.guard import Guard, GuardKind
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.guards.source_writer import Writer

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call of the step."""

Instruction = tuple[str, Any, int]
"""(test of the native program, its operand, its number)"""


class Kind(ABC):
    """One kind of guard: its description, its test as generated Python, its check without generated code.

    Attributes:
        phase: when generated code tests it. ``"value"``: where the value is fetched, so that nothing is fetched below
            a value of another type. ``"tensor"``: all tensors in one call, after the values. ``"relation"``: last, for
            what compares several values or computes with them.
        native: True if the native program tests guards of this kind on objects that the entry holds.
    """

    phase: ClassVar[Literal["value", "tensor", "relation"]] = "value"
    native: ClassVar[bool] = False

    @abstractmethod
    def describe(self, guard: Guard) -> str:
        """Returns the condition in words."""

    @abstractmethod
    def python_test(self, writer: Writer, guard: Guard) -> str:
        """Returns a Python expression that is true where the guard fails."""

    @abstractmethod
    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        """Evaluates the guard without generated code: (failed, the value found)."""

    def others(self, guard: Guard) -> tuple[Source, ...]:
        """Returns the sources that are read besides ``guard.source``."""
        return ()

    def instruction(self, guard: Guard) -> Instruction:
        """Returns the test in the native program; by default, one that is called like the kind and takes its value."""
        return guard.kind, guard.value, -1


KINDS: dict[GuardKind, Kind] = {}
"""The kinds by name."""


def register(name: GuardKind) -> Callable[[type[Kind]], type[Kind]]:
    """Registers a class under the name of its kind."""

    def add(cls: type[Kind]) -> type[Kind]:
        KINDS[name] = cls()
        return cls

    return add


def describe(guard: Guard) -> str:
    """Returns the condition of a guard in words."""
    return KINDS[guard.kind].describe(guard)


def target(writer: Writer, guard: Guard) -> str:
    """Returns an expression for the tested value; a value tested once and never used again needs no variable."""
    return writer.value(guard.source) if writer.is_fetched(guard.source) else writer.access(guard.source)
