"""Exceptions of the interpreted program: the handled exception, chaining, unwinding, tracebacks."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.frame import Frame, Handled
from sidefx_train.compile.capture.interpreter.frame_objects import frame_object
from sidefx_train.compile.common.type_checks import safe_isinstance, set_field
from sidefx_train.compile.common.user_code import PACKAGE_DIR

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


_KEEP_INTERNAL = bool(os.environ.get("SIDEFX_FULL_TRACEBACKS"))
"""Set in the environment to see the library's own frames in tracebacks."""


class HandledOutside(Handled):
    """Bottom of the stack: the exception that was handled when the program was entered, evaluated on first use.

    Args:
        look: returns the exception.
    """

    __slots__ = ("_known", "_look", "_value")

    def __init__(self, look: Callable[[], BaseException | None]) -> None:
        self._look = look
        self._known = False
        self._value: BaseException | None = None
        self.previous = None

    @property
    def value(self) -> BaseException | None:  # type: ignore[override]
        if not self._known:
            self._known, self._value = True, self._look()
        return self._value

    @value.setter
    def value(self, error: BaseException | None) -> None:
        self._known, self._value = True, error


def chain(error: BaseException, handled: BaseException | None, outside: BaseException | None = None) -> None:
    """Makes ``handled`` the oldest context of ``error``, unless it is in the chain already.

    C code that raises in the program finds ``outside`` as the handled exception; it is removed from the chain.
    """
    if handled is None or error is handled:
        return
    oldest, seen = error, {id(error)}
    while oldest.__context__ is not None:
        if oldest.__context__ is outside and outside is not handled:
            set_field(oldest, "__context__", None)
            break
        oldest = oldest.__context__
        if oldest is handled or id(oldest) in seen:
            return
        seen.add(id(oldest))
    if not _reaches(handled, oldest):
        set_field(oldest, "__context__", handled)


def set_context(error: BaseException, handled: BaseException | None) -> None:
    """Sets the context as a ``raise`` statement does: ``handled`` becomes the context of ``error``, cycles are cut."""
    if handled is None or error is handled:
        return
    item, seen = handled, {id(handled)}
    while item.__context__ is not None:
        if item.__context__ is error:
            set_field(item, "__context__", None)
            break
        item = item.__context__
        if id(item) in seen:
            break
        seen.add(id(item))
    set_field(error, "__context__", handled)


def _reaches(start: BaseException, goal: BaseException) -> bool:
    item: BaseException | None = start
    seen: set[int] = set()
    while item is not None and id(item) not in seen:
        if item is goal:
            return True
        seen.add(id(item))
        item = item.__context__
    return False


def unwind(interp: InterpreterAPI, frame: Frame, error: BaseException) -> bool:
    """Continues ``frame`` at its handler of ``error``; returns False if it has none and the frame is left."""
    instr = frame.instructions[frame.pc - 1] if frame.pc else frame.instructions[0]
    if interp.in_flight is not error:
        chain(error, interp.handled.topmost(), interp.handled_natively)
        interp.in_flight = error
    again = instr.name == "RERAISE"
    if instr.name == "RAISE_VARARGS" and instr.arg == 0:
        again = error is interp.handled.topmost()
    if not again:
        set_field(error, "__traceback__", _extended(frame, error.__traceback__))
    else:
        set_field(error, "__traceback__", cleaned(error.__traceback__))
    if instr.handler is None:
        frame.done = True
        return False
    target, depth, push_lasti = instr.handler
    del frame.stack[depth:]
    if push_lasti:
        frame.push(frame.pc - 1)
    frame.push(error)
    frame.pc = target
    interp.in_flight = None
    return True


def cleaned(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Removes the interpreter's own frames from ``trace``, unless ``SIDEFX_FULL_TRACEBACKS`` is set."""
    if _KEEP_INTERNAL:
        return trace
    while trace is not None and _is_own(trace):
        trace = trace.tb_next
    item = trace
    while item is not None:
        if _is_own(item):
            return _rebuilt(trace)
        item = item.tb_next
    return trace


def of_the_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Removes the library's frames above the program's; frames after the program's last one stay."""
    if _KEEP_INTERNAL:
        return trace
    last, item = None, trace
    while item is not None:
        last = last if _is_own(item) else item
        item = item.tb_next
    return trace if last is None else _rebuilt(trace, last)


def is_own(code: types.CodeType) -> bool:
    """Returns True for code of this library and code that it has generated."""
    return code.co_filename.startswith((PACKAGE_DIR, "<sidefx_train"))


def _is_own(item: types.TracebackType) -> bool:
    return is_own(item.tb_frame.f_code)


def _rebuilt(trace: types.TracebackType | None, last: types.TracebackType | None = None) -> types.TracebackType | None:
    """Rebuilds a traceback from the program's entries and all entries after ``last``."""
    kept, behind = [], False
    while trace is not None:
        if behind or not _is_own(trace):
            kept.append(trace)
        behind = behind or trace is last
        trace = trace.tb_next
    result: types.TracebackType | None = None
    for item in reversed(kept):
        result = types.TracebackType(result, item.tb_frame, item.tb_lasti, item.tb_lineno)
    return result


def _extended(frame: Frame, trace: types.TracebackType | None) -> types.TracebackType:
    """Prepends an entry for the interpreted ``frame`` to ``trace``."""
    return types.TracebackType(cleaned(trace), frame_object(frame), 0, frame.line)


def as_exception(interp: InterpreterAPI, value: Any) -> BaseException:
    """Returns the exception instance that ``raise value`` raises; creates it if ``value`` is a class."""
    if safe_isinstance(value, type) and issubclass(value, BaseException):
        made = interp.call(value, (), {})
        if not safe_isinstance(made, BaseException):
            raise TypeError(f"calling {value!r} should have returned an instance of BaseException, not {type(made)!r}")
        return made
    if safe_isinstance(value, BaseException):
        return value
    raise TypeError("exceptions must derive from BaseException")
