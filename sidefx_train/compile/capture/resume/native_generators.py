"""Converts interpreted generators that outlive the trace to real ones, which continue natively."""

from __future__ import annotations

import types
from typing import Any

from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.capture.resume.resume_function import function, generator
from sidefx_train.compile.capture.resume.suspension import State, describe
from sidefx_train.errors import Unsupported


def hand_out(value: InterpretedGenerator) -> tuple[types.CodeType, State]:
    """Returns the code of a generator function that continues where ``value`` is suspended, and its argument.

    Raises:
        Unsupported: it has finished or is running.
    """
    frame = value.frame
    name = value.__qualname__
    if value.running or frame.done:
        raise Unsupported("SFX104", f"the generator {name} leaves the step {'at its end' if frame.done else 'running'}")
    layout, _, state, _ = describe(frame, frame.pc, False, value.handled.value, value.interp.world.watched, given=1)
    return generator(layout, value.started, value.delegate is not None), state


def resume(
    code: types.CodeType, space: dict[str, Any], name: str, qualname: str, started: bool, state: State
) -> types.GeneratorType[Any, Any, Any]:
    """Creates the real generator.

    Args:
        code: code from :func:`hand_out`.
        space: the function's globals.
        name: the generator's name.
        qualname: its qualified name.
        started: it is suspended at a ``yield``.
        state: the state from :func:`hand_out`, with real values.
    """
    made: types.GeneratorType[Any, Any, Any] = function(code, space)(state)
    made.__name__, made.__qualname__ = name, qualname
    if started:
        next(made)
    return made
