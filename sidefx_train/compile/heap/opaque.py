"""Outside objects of C classes that many libraries touch in passing: context variables and locks."""

from __future__ import annotations

import _thread
import contextvars
import functools
from typing import TYPE_CHECKING, Any, NoReturn

from sidefx_train.compile.capture.world import ABSENT
from sidefx_train.compile.heap.effects import SideEffects
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.heap.world import TraceWorld

if not TYPE_CHECKING:
    from sidefx_train.compile.capture.kinds import isinstance

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
        self._getters: dict[int, functools.partial[Any]] = {}
        self._keep: list[Any] = []

    def call(self, name: str, variable: contextvars.ContextVar[Any], args: tuple[Any, ...]) -> Any:
        """``variable.get/set/reset`` on the capture's own values."""
        if name == "get":
            if id(variable) in self.values and self.values[id(variable)] is not ABSENT:
                return self.values[id(variable)]
            value = self._outside(variable)
            if value is ABSENT and args:
                return args[0]
            return variable.get() if value is ABSENT else value  # raises, as it does outside
        if name == "set":
            token = Token(variable, self.values.get(id(variable), ABSENT))
            self._keep.append(variable)
            self.values[id(variable)] = args[0]
            return token
        if name == "reset" and isinstance(args[0], Token):
            self.values[id(variable)] = args[0].old
            return None
        raise Unsupported("SFX104", f"ContextVar.{name} of an outside context variable", self.world.locate())

    def _outside(self, variable: contextvars.ContextVar[Any]) -> Any:
        """The value that the variable has outside the step, guarded; :data:`ABSENT` for none."""
        heap = self.world.heap
        known = self._getters.get(id(variable))
        if known is None:
            known = self._getters[id(variable)] = functools.partial(_get, variable)
        source = heap.sources.call(heap.sources.const(known, variable.name))
        value = known()
        if value is ABSENT:
            heap.guard("is", source, ABSENT)
            return ABSENT
        return heap.shadow(value, source)

    def leftover(self) -> bool:
        """True if the step leaves a variable set."""
        return any(value is not ABSENT for value in self.values.values())


def _get(variable: contextvars.ContextVar[Any]) -> Any:
    return variable.get(ABSENT)


class Locks:
    """Locks that the step takes and releases: on the one thread of the step, so they are only counted.

    What a part of a step leaves taken, or released, is taken or released after its graph.
    """

    def __init__(self, world: TraceWorld) -> None:
        self.world = world
        self._counts: dict[int, tuple[Any, int, int]] = {}
        """Lock, how often it was taken at entry, and now."""

    def call(self, name: str, lock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of a lock."""
        taken = self._taken(lock)
        if name in ("acquire", "acquire_lock", "__enter__"):
            blocking = args[0] if args else kwargs.get("blocking", True)
            if taken and type(lock) is _thread.LockType:
                if blocking:
                    self._refuse("waits for a lock that is taken")
                return False
            self._count(lock, taken + 1)
            return True
        if name in ("release", "release_lock", "__exit__"):
            if not taken:
                plain = type(lock) is _thread.LockType
                raise RuntimeError("release unlocked lock" if plain else "cannot release un-acquired lock")
            self._count(lock, taken - 1)
            return None
        if name in ("locked", "locked_lock", "_is_owned"):
            return taken > 0
        return self._refuse(f"calls {name} of a lock")

    def settle(self) -> None:
        """Has what the step leaves otherwise than it found it taken or released by a replay."""
        for lock, before, now in self._counts.values():
            method = type(lock).acquire if now > before else type(lock).release
            for _ in range(abs(now - before)):
                self.world.defer(method, (lock,), {})

    def _taken(self, lock: Any) -> int:
        known = self._counts.get(id(lock))
        if known is not None:
            return known[2]
        heap, record = self.world.heap, self.world.heap.record_of(lock)
        taken = 0
        if record is not None:
            asks = "locked" if type(lock) is _thread.LockType else "_is_owned"
            answer = getattr(lock, asks)()
            heap.guard("equal", heap.sources.call(heap.sources.slot(record.base, asks)), answer)
            if answer and type(lock) is not _thread.LockType and (taken := _times(lock)) > 1:
                self._refuse("goes on with a lock that was taken several times")
            taken = int(answer)
        self._counts[id(lock)] = (lock, taken, taken)
        return taken

    def _count(self, lock: Any, taken: int) -> None:
        self._counts[id(lock)] = (lock, self._counts[id(lock)][1], taken)

    def _refuse(self, reason: str) -> NoReturn:
        raise Unsupported("SFX103", reason, self.world.locate())


def _times(lock: Any) -> int:
    """How often the current thread has taken an ``RLock``."""
    return int(lock._recursion_count())


def check_nothing_left(variables: ContextVariables, effects: SideEffects) -> None:
    """Refuses a step that leaves a context variable changed."""
    if variables.leftover():
        raise Unsupported("SFX111", f"leaves a context variable set ({len(effects.changes)} other effects)", None)
