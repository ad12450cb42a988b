"""Exceptions of the interpreted program: which one is being handled, chaining, unwinding, tracebacks."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import types
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidefx_train.compile.capture.frame import Frame
    from sidefx_train.compile.capture.interpreter import Interpreter

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The compiler's own directory: the interpreter, and the world that C code is called through."""
_KEEP_INTERNAL = bool(os.environ.get("SFX_INTERPRETER_TRACEBACKS"))
"""Set in the environment to see the interpreter's own frames in tracebacks."""


class Handled:
    """The exception being handled, and what the caller of a generator was handling."""

    __slots__ = ("previous", "value")

    def __init__(self) -> None:
        self.value: BaseException | None = None
        self.previous: Handled | None = None

    def topmost(self) -> BaseException | None:
        """The innermost exception being handled, as ``sys.exception()`` would tell."""
        item: Handled | None = self
        while item is not None:
            if item.value is not None:
                return item.value
            item = item.previous
        return None


class HandledOutside(Handled):
    """At the bottom: what was being handled when the program was entered, looked up when it first matters.

    Args:
        look: gives it.
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


def chain(error: BaseException, handled: BaseException | None) -> None:
    """Makes ``handled`` the oldest context of ``error``, unless it is there already."""
    if handled is None or error is handled:
        return
    oldest, seen = error, {id(error)}
    while oldest.__context__ is not None:
        oldest = oldest.__context__
        if oldest is handled or id(oldest) in seen:
            return
        seen.add(id(oldest))
    if not _reaches(handled, oldest):
        oldest.__context__ = handled


def set_context(error: BaseException, handled: BaseException | None) -> None:
    """What a ``raise`` statement does: ``handled`` becomes the context of ``error``, cycles are cut."""
    if handled is None or error is handled:
        return
    item, seen = handled, {id(handled)}
    while item.__context__ is not None:
        if item.__context__ is error:
            item.__context__ = None
            break
        item = item.__context__
        if id(item) in seen:
            break
        seen.add(id(item))
    error.__context__ = handled


def _reaches(start: BaseException, goal: BaseException) -> bool:
    item: BaseException | None = start
    seen: set[int] = set()
    while item is not None and id(item) not in seen:
        if item is goal:
            return True
        seen.add(id(item))
        item = item.__context__
    return False


def unwind(interp: Interpreter, frame: Frame, error: BaseException) -> bool:
    """Moves ``frame`` to its handler of ``error``; false if it has none and the frame is left."""
    instr = frame.instructions[frame.pc - 1] if frame.pc else frame.instructions[0]
    if interp.in_flight is not error:
        chain(error, interp.handled.topmost())
        interp.in_flight = error
    again = instr.name == "RERAISE"
    if instr.name == "RAISE_VARARGS" and instr.arg == 0:
        again = error is interp.handled.topmost()
    if not again:
        error.__traceback__ = _extended(frame, error.__traceback__)
    else:
        error.__traceback__ = cleaned(error.__traceback__)
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
    """``trace`` without the interpreter's own frames, unless ``SFX_INTERPRETER_TRACEBACKS`` is set."""
    if _KEEP_INTERNAL:
        return trace
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    item = trace
    while item is not None:
        if item.tb_frame.f_code.co_filename.startswith(_HERE):
            return _rebuilt(trace)
        item = item.tb_next
    return trace


def _rebuilt(trace: types.TracebackType | None) -> types.TracebackType | None:
    kept = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_HERE):
            kept.append(trace)
        trace = trace.tb_next
    result: types.TracebackType | None = None
    for item in reversed(kept):
        result = types.TracebackType(result, item.tb_frame, item.tb_lasti, item.tb_lineno)
    return result


def _extended(frame: Frame, trace: types.TracebackType | None) -> types.TracebackType:
    """``trace`` with an entry for the interpreted ``frame`` in front."""
    return types.TracebackType(cleaned(trace), stand_in(frame), 0, frame.line)


def _call(get: Callable[[], types.FrameType]) -> types.FrameType:
    return get()


def _suspended() -> Generator[None, None, None]:
    yield


def _holding(variables: list[Any]) -> Generator[None, None, None]:
    yield


def stand_in(frame: Frame) -> types.FrameType:
    """A real frame object with the file, line, name and globals of an interpreted frame, but no locals.

    Variables with a ``__del__`` live as long as it: a traceback keeps them.
    """
    if any(hasattr(type(value), "__del__") for value in frame.locals):
        made = types.FunctionType(_stub(frame, _holding, {}), frame.globals)(frame.locals)
    else:
        made = types.FunctionType(_stub(frame, _suspended, frame.program.stubs), frame.globals)()
    return made.gi_frame  # the frame of a generator has no caller that it could keep alive


def stack_of_stand_ins(frame: Frame) -> types.FrameType:
    """Like :func:`stand_in`, and ``f_back`` leads through the interpreted callers."""
    get: Callable[[], types.FrameType] = sys._getframe
    item: Frame | None = frame
    while item is not None:
        get = functools.partial(types.FunctionType(_stub(item, _call, {}), item.globals), get)
        item = item.back
    return get()


def _stub(frame: Frame, model: Any, cache: dict[int, types.CodeType]) -> types.CodeType:
    """The code of ``model`` with the names and the current position of ``frame``."""
    code, index = frame.code, max(frame.pc - 1, 0)
    known = cache.get(index)
    if known is None:
        body = model.__code__
        offset = frame.instructions[index].offset
        place = next(itertools.islice(code.co_positions(), offset // 2, None))
        known = cache[index] = body.replace(
            co_filename=code.co_filename,
            co_name=code.co_name,
            co_qualname=code.co_qualname,
            co_firstlineno=code.co_firstlineno,
            co_linetable=_one_place(len(body.co_code) // 2, frame.line, code.co_firstlineno, place),
        )
    return known


def _one_place(units: int, line: int, first: int, place: tuple[int | None, ...]) -> bytes:
    """A location table (CPython's ``Objects/locations.md``) that puts all instructions at one place."""
    _, end_line, column, end_column = place
    known = end_line is not None and column is not None and end_column is not None
    table = bytearray()
    delta = line - first
    while units > 0:
        length = min(units, 8)
        table.append(0x80 | (14 if known else 13) << 3 | length - 1)
        _append_number(table, delta << 1 if delta >= 0 else -delta << 1 | 1)
        if end_line is not None and column is not None and end_column is not None:
            for number in (max(end_line - line, 0), column + 1, end_column + 1):
                _append_number(table, number)
        units, delta = units - length, 0
    return bytes(table)


def _append_number(table: bytearray, number: int) -> None:
    while number >= 64:
        table.append(64 | number & 63)
        number >>= 6
    table.append(number)


def as_exception(interp: Interpreter, value: Any) -> BaseException:
    """The exception that ``raise value`` raises: an instance, made by a call if ``value`` is a class."""
    if isinstance(value, type) and issubclass(value, BaseException):
        made = interp.call(value, (), {})
        if not isinstance(made, BaseException):
            raise TypeError(f"calling {value!r} should have returned an instance of BaseException, not {type(made)!r}")
        return made
    if isinstance(value, BaseException):
        return value
    raise TypeError("exceptions must derive from BaseException")
