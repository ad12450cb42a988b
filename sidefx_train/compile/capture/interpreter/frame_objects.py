"""Real frame objects for interpreted frames: for tracebacks, code that walks the stack, and calls on behalf of an
interpreted function."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.frame import NULL
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.frame import Frame
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


def _call(get: Callable[[], Any]) -> Any:
    return get()


def _suspended() -> Generator[None, None, None]:
    yield


def _holding(variables: list[Any]) -> Generator[None, None, None]:
    yield


def frame_object(frame: Frame) -> types.FrameType:
    """Returns a real frame object with the file, line, name and globals of an interpreted frame, but without locals.

    It keeps variables with a ``__del__`` alive, as a traceback does.
    """
    if any(hasattr(type(value), "__del__") for value in frame.locals):
        made = types.FunctionType(_stub(frame, _holding, {}), frame.globals)(frame.locals)
    else:
        made = types.FunctionType(_stub(frame, _suspended, frame.info.stubs), frame.globals)()
    return made.gi_frame  # the frame of a generator has no caller that it could keep alive


def frame_object_stack(interp: InterpreterAPI, frame: Frame) -> types.FrameType:
    """Returns a frame object whose ``f_back`` chain contains the interpreted callers."""
    found: types.FrameType = Place(frame)(sys._getframe)
    made: types.FrameType | None = found
    item: Frame | None = frame
    while item is not None and made is not None:
        interp.substitute_frames[id(made)] = (made, item)
        made, item = made.f_back, item.back
    return found


class Place:
    """Calls functions on top of frame objects of an interpreted frame and its callers, for code that walks the stack.

    Args:
        frame: the innermost frame.
    """

    def __init__(self, frame: Frame) -> None:
        self._stubs: list[Callable[..., Any]] = []
        item: Frame | None = frame
        while item is not None:
            self._stubs.append(types.FunctionType(_stub(item, _call, {}), item.globals))
            item = item.back

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(fn, *args, **kwargs)
        for stub in self._stubs:
            call = functools.partial(stub, call)
        return call()


def _stub(frame: Frame, model: Any, cache: dict[int, types.CodeType]) -> types.CodeType:
    """Returns the code of ``model`` with the names and the current position of ``frame``."""
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
    """Returns a location table (CPython's ``Objects/locations.md``) that maps all instructions to one position."""
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


def of_frame(interp: InterpreterAPI, frame: Frame, name: str) -> Any:
    """Returns an attribute of an interpreted frame's frame object, in its current state."""
    if name == "f_code":
        return frame.code
    if name == "f_lineno":
        return frame.line
    if name == "f_lasti":
        return frame.instructions[max(frame.pc - 1, 0)].offset
    if name == "f_globals":
        return interp.world.globals_dict(frame.globals)
    if name == "f_locals":
        return names_in(interp, frame)
    return ABSENT


def names_in(interp: InterpreterAPI, frame: Frame) -> Any:
    """Returns the variables of a frame."""
    if frame.namespace is not None:
        return frame.namespace
    found = {}
    cells = {*frame.code.co_cellvars, *frame.code.co_freevars}
    for name, value in zip(frame.info.slots, frame.locals, strict=False):
        if name in cells and safe_isinstance(value, types.CellType):
            value = interp.world.load_cell(value)
        if value is not NULL and value is not ABSENT:
            found[name] = value
    return found
