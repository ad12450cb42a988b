"""Interpreted generators as real ones: a generator of the trace that outlives it goes on natively."""

from __future__ import annotations

import types
from typing import Any

from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.capture.resume.resume_function import function, generator
from sidefx_train.compile.capture.resume.suspension import State, describe
from sidefx_train.errors import Unsupported


def hand_out(value: InterpretedGenerator) -> tuple[types.CodeType, State]:
    """The code of a generator function that goes on where ``value`` is suspended, and its argument.

    Raises:
        Unsupported: it has come to its end, or is running.
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
    """The real generator.

    Args:
        code: of :func:`hand_out`.
        space: the function's globals.
        name: the generator's name.
        qualname: likewise.
        started: it is suspended at a ``yield``.
        state: real values for those of :func:`hand_out`.
    """
    made: types.GeneratorType[Any, Any, Any] = function(code, space)(state)
    made.__name__, made.__qualname__ = name, qualname
    if started:
        next(made)
    return made
