"""Runs a body in plain CPython and in the interpreter, and compares everything observable.

A body is a function without arguments that builds all it needs. The comparison covers the returned value, the printed
text, and for an exception its type, message, causes, contexts and the functions, lines and columns of its traceback.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from sidefx_train.compile.capture.interpreter.interpreter import Interpreter
from sidefx_train.compile.capture.interpreter.world import DirectWorld


class Outcome(NamedTuple):
    """Everything observable of one run."""

    value: Any
    printed: str
    error: Any


def describe(error: BaseException | None, file: str, seen: tuple[int, ...] = ()) -> Any:
    """Returns type, message, traceback in ``file``, cause and context of an exception, for comparison."""
    if error is None or id(error) in seen:
        return None
    seen = (*seen, id(error))
    trace, item = [], error.__traceback__
    while item is not None:
        if item.tb_frame.f_code.co_filename == file:
            code = item.tb_frame.f_code
            place = next(itertools.islice(code.co_positions(), item.tb_lasti // 2, None))
            trace.append((code.co_name, item.tb_lineno, place))
        item = item.tb_next
    parts = ()
    if isinstance(error, BaseExceptionGroup):
        parts = tuple(describe(part, file, seen) for part in error.exceptions)
    return (
        type(error).__name__,
        str(error),
        trace,
        parts,
        getattr(error, "__notes__", None),
        error.__suppress_context__,
        describe(error.__cause__, file, seen),
        describe(error.__context__, file, seen),
    )


def observe(call: Callable[[], Any], file: str) -> Outcome:
    """Runs ``call`` and records the result or exception, and the printed text."""
    printed = io.StringIO()
    value = error = None
    with contextlib.redirect_stdout(printed):
        try:
            value = call()
        except Exception as raised:
            error = raised
    return Outcome(value, printed.getvalue(), describe(error, file))


def check(body: Callable[[], Any]) -> None:
    """Fails unless CPython and the interpreter agree about ``body``."""
    file = body.__code__.co_filename
    wanted = observe(lambda: body(), file)
    found = observe(lambda: Interpreter(DirectWorld()).run(body), file)
    assert found.error == wanted.error, f"raised {found.error}, should be {wanted.error}"
    assert found.printed == wanted.printed, f"printed {found.printed!r}, should be {wanted.printed!r}"
    assert type(found.value) is type(wanted.value), f"returned {found.value!r}, should be {wanted.value!r}"
    assert found.value == wanted.value, f"returned {found.value!r}, should be {wanted.value!r}"


def bodies(namespace: dict[str, Any]) -> list[Any]:
    """Returns the functions of a test module whose names start with ``body_``."""
    return [value for name, value in namespace.items() if name.startswith("body_")]
