"""Outside objects of C classes that many libraries touch in passing: context variables and locks."""

from __future__ import annotations

import _thread
import contextvars
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.world import ABSENT
from sidefx_train.compile.heap.effects import SideEffects
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.heap.world import TraceWorld

LOCKS: tuple[type, ...] = (_thread.LockType, _thread.RLock)


class Token:
    """Stands for a ``contextvars.Token`` of a variable set during the capture."""

    def __init__(self, variable: contextvars.ContextVar[Any], old: Any) -> None:
        self.variable = variable
        self.old = old


class ContextVariables:
    """Values that the step gave context variables; outside ones are only read."""

    def __init__(self, world: TraceWorld) -> None:
        self.world = world
        self.values: dict[int, Any] = {}
        self._keep: list[Any] = []

    def call(self, name: str, variable: contextvars.ContextVar[Any], args: tuple[Any, ...]) -> Any:
        """``variable.get/set/reset`` on the capture's own values."""
        if name == "get":
            if id(variable) in self.values and self.values[id(variable)] is not ABSENT:
                return self.values[id(variable)]
            return self._outside(variable, args)
        if name == "set":
            token = Token(variable, self.values.get(id(variable), ABSENT))
            self._keep.append(variable)
            self.values[id(variable)] = args[0]
            return token
        if name == "reset" and isinstance(args[0], Token):
            self.values[id(variable)] = args[0].old
            return None
        raise Unsupported("SFX104", f"ContextVar.{name} of an outside context variable", self.world.locate())

    def _outside(self, variable: contextvars.ContextVar[Any], default: tuple[Any, ...]) -> Any:
        heap = self.world.heap
        getter = heap.sources.slot(heap.sources.const(variable, variable.name), "get")
        value = variable.get(*default)
        return heap.shadow(value, heap.sources.call(getter)) if not default else value

    def leftover(self) -> bool:
        """True if the step leaves a variable set."""
        return any(value is not ABSENT for value in self.values.values())


def lock_method(name: str) -> Any:
    """Locks are taken and released within the step, on one thread: nothing to record."""
    return {"acquire": True, "__enter__": True, "locked": False}.get(name)


def check_nothing_left(variables: ContextVariables, effects: SideEffects) -> None:
    """Refuses a step that leaves a context variable changed."""
    if variables.leftover():
        raise Unsupported("SFX111", f"leaves a context variable set ({len(effects.changes)} other effects)", None)
