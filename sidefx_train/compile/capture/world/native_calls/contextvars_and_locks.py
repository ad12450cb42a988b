"""Context variables and locks: outside objects of C classes that many libraries use."""

from __future__ import annotations

import _thread
import _warnings
import contextvars
import functools
import sys
from contextvars import Token
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from sidefx_train.compile.capture.shadows import transient_objects
from sidefx_train.compile.capture.shadows.deferred_values import DeferredCall, DeferredResult
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.common.plain_values import PLAIN_TYPES
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.errors import Location, Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext

_NUMPY_ERRORS = "numpy.ufunc.extobj"
"""Name of the variable that ``np.errstate`` sets."""
_NUMPY_PRINTING = "format_options"
"""Name of the variable that ``np.printoptions`` sets: deferred calls read it, too, which run after the step."""
LOCKS: tuple[type, ...] = (_thread.LockType, _thread.RLock)


class ContextVariables:
    """Runs context variables in a context of the capture; a replay repeats the changes that last.

    A token that the step keeps is a real one both times: the replay sets and resets like the step.
    """

    def __init__(self, world: CaptureContext) -> None:
        self.world = world
        self._context = contextvars.Context()
        self._getters: dict[contextvars.ContextVar[Any], functools.partial[Any]] = {}
        self._unset: dict[contextvars.ContextVar[Any], Token] = {}
        """Tokens that restore a variable's state at entry, if it was unset."""
        self._changes: list[_Change] = []
        self._of_numpy: tuple[contextvars.ContextVar[Any], Token] | None = None
        """NumPy's variable while the step has set it, and the token that takes this back."""

    def call(self, name: str, variable: contextvars.ContextVar[Any], args: tuple[Any, ...]) -> Any:
        """Runs ``variable.get/set/reset`` on the capture's own values."""
        if name != "get" and variable.name == _NUMPY_PRINTING:
            self.world.heap.refuse("SFX103", "changes how NumPy shows arrays")
        if variable not in self._getters:
            self._enter(variable)
        known = self.world.heap.record_of(args[0]) if name == "reset" and len(args) == 1 else None
        if known is not None:
            return self._reset_outside(variable, known)
        result = self._context.run(getattr(variable, name), *args)
        if name != "get" and variable.name == _NUMPY_ERRORS:
            self._show_numpy(variable)
        if name != "get":
            token, value = (result, args[0]) if name == "set" else (args[0], None)
            self._changes.append(_Change(name, variable, token, value, self.world.locate()))
            _forget_value(self._changes)
        return result

    @property
    def sets_numpy_errors(self) -> bool:
        """True while the step has set how NumPy reports floating-point errors."""
        return self._of_numpy is not None

    def guard_numpy_errors(self) -> None:
        """Guards how NumPy reports floating-point errors outside the step: C code of NumPy is called."""
        if self._of_numpy is None:
            self.world.queries.guard(np.geterr, "numpy.geterr()")

    def guard_numpy_printing(self) -> None:
        """Guards how NumPy shows arrays: C code makes text of one."""
        self.world.queries.guard(np.get_printoptions, "numpy.get_printoptions()")

    def close(self) -> None:
        """Ends the capture: what NumPy's code has seen of it is taken back."""
        if self._of_numpy is not None:
            variable, token = self._of_numpy
            self._of_numpy = None
            variable.reset(token)

    def _show_numpy(self, variable: contextvars.ContextVar[Any]) -> None:
        """Gives the program's own variable the value of the capture, which C code of NumPy reads."""
        self.guard_numpy_errors()
        value = self._context.get(variable, ABSENT)
        if value is ABSENT:
            self.close()
        elif self._of_numpy is None:
            self._of_numpy = variable, variable.set(value)
        else:
            variable.set(value)

    def held(self) -> list[Any]:
        """Returns the objects of the trace that variables hold, and tokens."""
        return [*self._context.values(), *self._changes]

    def count(self) -> int:
        """Returns the number of changes."""
        return len(self._changes)

    def take_back(self, count: int) -> None:
        """Reverts all changes but the first ``count``.

        Raises:
            Unsupported: a token from before them was used.
        """
        changes_since = self._changes[count:]
        own = {id(change.token) for change in changes_since if change.name == "set"}
        if any(change.name == "reset" and id(change.token) not in own for change in changes_since):
            self._refuse("reverts a context variable's reset")
        used = {id(change.token) for change in changes_since if change.name == "reset"}
        for change in reversed(changes_since):
            if change.name == "set" and id(change.token) not in used:
                self._context.run(change.variable.reset, change.token)
                if change.variable.name == _NUMPY_ERRORS:
                    self._show_numpy(change.variable)
        del self._changes[count:]

    def settle(self) -> None:
        """Defers the changes that last, or whose token the step keeps, in program order."""
        heap, deferred = self.world.heap, self.world.deferred
        for change in self._lasting():
            if heap.record_of(change.variable) is None:
                self._refuse(f"leaves the context variable {change.variable.name}, made in the step, set")
            token, value = change.token, change.value
            method, result = getattr(change.variable, change.name), DeferredResult()
            if change.name == "reset":
                deferred.append(DeferredCall(method, (token,), {}, change.location, None, result))
                continue
            known = type(value) in PLAIN_TYPES or heap.record_of(value) is not None
            first = value if known else None  # an object of the step may hold the token
            deferred.append(DeferredCall(method, (first,), {}, change.location, None, token))
            if not known:
                deferred.append(DeferredCall(method, (value,), {}, change.location, None, result))

    def _enter(self, variable: contextvars.ContextVar[Any]) -> None:
        """Sets a variable to its value outside the step, guarded."""
        heap = self.world.heap
        getter = self._getters[variable] = functools.partial(_get, variable)
        value = getter()
        if heap.record_of(variable) is None:  # created in the step
            return
        source = heap.sources.call(heap.sources.const(getter, variable.name))
        if value is ABSENT:
            heap.guard("is", source, ABSENT)
        else:
            self._unset[variable] = self._context.run(variable.set, heap.shadow(value, source))

    def _reset_outside(self, variable: contextvars.ContextVar[Any], record: Record) -> None:
        """Runs ``variable.reset`` with a token from an earlier part of the step."""
        heap, token = self.world.heap, record.real
        if type(token) is not Token or not transient_objects.is_transient(heap, token, record.source):
            self._refuse("resets a context variable by a token from before the step")
        if any(change.token is token for change in self._changes):
            raise RuntimeError(f"{repr(token).replace('<Token', '<Token used', 1)} has already been used once")
        try:
            contextvars.copy_context().run(variable.reset, token)
        except ValueError:
            if token.var is not variable:
                raise
        heap.guard("is", heap.sources.slot(record.source, "var"), variable)
        old = token.old_value
        if old is not Token.MISSING:
            self._context.run(variable.set, heap.shadow(old, heap.sources.slot(record.source, "old_value")))
        else:
            heap.guard("is", heap.sources.slot(record.source, "old_value"), old)
        if old is Token.MISSING and variable in self._context:
            unset = self._unset.pop(variable, None)
            if unset is None:
                self._refuse("unsets a context variable twice")
            self._context.run(variable.reset, unset)
        self._changes.append(_Change("reset", variable, token, None, self.world.locate()))

    def _lasting(self) -> list[_Change]:
        """Returns the changes that are visible after the step; omits those that were reset and whose token is gone."""
        lasting: list[_Change] = []
        for change in self._changes:
            lasting.append(change)
            if _forget_value(lasting) and _is_gone(change):
                del lasting[-2:]
        return lasting

    def _refuse(self, reason: str) -> NoReturn:
        raise Unsupported("SFX111", reason, self.world.locate())


@dataclass(slots=True)
class _Change:
    """A ``set`` that returned a token, or a ``reset`` with one."""

    name: str
    variable: contextvars.ContextVar[Any]
    token: Any
    value: Any
    location: Location | None


def _forget_value(changes: list[_Change]) -> bool:
    """Drops the value of the change before the last if the last reverts it; returns True then."""
    if len(changes) < 2:
        return False
    last, before = changes[-1], changes[-2]
    undone = last.name == "reset" and before.name == "set" and last.token is before.token
    if undone:
        before.value = None
    return undone


def _is_gone(change: _Change) -> bool:
    """Returns True if only a ``reset`` and the ``set`` before it refer to the token; callers must hold no local
    name."""
    return sys.getrefcount(change.token) == 3  # the third is that of the call


def _get(variable: contextvars.ContextVar[Any]) -> Any:
    return variable.get(ABSENT)


WARNINGS_LOCK: tuple[Any, ...] = tuple(
    vars(_warnings)[name] for name in ("_acquire_lock", "_release_lock") if hasattr(_warnings, name)
)
"""Functions of C that acquire and release the lock of :mod:`warnings`; from Python 3.14 on."""


class Locks:
    """Locks that the step acquires and releases: a step runs in one thread, so they are only counted.

    Acquisitions and releases that outlast a part of a step are made after its graph.
    """

    def __init__(self, world: CaptureContext) -> None:
        self.world = world
        self._counts: dict[int, tuple[Any, int, int]] = {}
        """Lock, number of acquisitions at entry, and now."""
        self._of_warnings = 0

    def call(self, name: str, lock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a method of a lock."""
        taken = self._taken(lock)
        if name in ("acquire", "acquire_lock", "__enter__"):
            blocking = args[0] if args else kwargs.get("blocking", True)
            if taken and type(lock) is _thread.LockType:
                if blocking:
                    self._refuse("waits for a lock that is held")
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
        """Defers acquisitions or releases of locks whose count differs from that at entry."""
        for lock, before, now in self._counts.values():
            method = type(lock).acquire if now > before else type(lock).release
            for _ in range(abs(now - before)):
                self.world.defer(method, (lock,), {})
        for _ in range(abs(self._of_warnings)):
            self.world.defer(WARNINGS_LOCK[0 if self._of_warnings > 0 else 1], (), {})

    def count_of_warnings(self, change: int) -> None:
        """Counts an acquisition or release of the lock of ``warnings``: a capture that stops would not release it."""
        self._of_warnings += change

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
                self._refuse("continues with a lock that was acquired several times")
            taken = int(answer)
        self._counts[id(lock)] = (lock, taken, taken)
        return taken

    def _count(self, lock: Any, taken: int) -> None:
        self._counts[id(lock)] = (lock, self._counts[id(lock)][1], taken)

    def _refuse(self, reason: str) -> NoReturn:
        raise Unsupported("SFX103", reason, self.world.locate())


def _times(lock: Any) -> int:
    """Returns how often the current thread has acquired an ``RLock``."""
    return int(lock._recursion_count())
