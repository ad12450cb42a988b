"""What runs between two parts of a step: bridges natively, and parts captured in turn."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from sidefx_train.compile.capture.exceptions import of_the_program
from sidefx_train.compile.capture.program import program_of
from sidefx_train.compile.continuations.code import Landing, Layout, continuation
from sidefx_train.compile.continuations.suspension import State, Suspension


class Again:
    """What a suspended part returns: its outermost frame goes on under the driver."""

    __slots__ = ("frames", "states")

    def __init__(self, frames: Frames, states: tuple[State, ...]) -> None:
        self.frames = frames
        self.states = states


class Parts:
    """The continuations of one step, each a compiled step of its own, made on first use.

    Args:
        make: ``make(fn, name)`` compiles a continuation.
    """

    def __init__(self, make: Callable[[types.FunctionType, str], Callable[..., Any]]) -> None:
        self._make = make
        self._steps: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def after(self, layout: Layout, space: dict[str, Any]) -> Callable[..., Any]:
        """The compiled rest of a function."""
        key = layout.key
        step = self._steps.get(key)
        if step is None:
            code = continuation(layout)
            fn = types.FunctionType(code, space, code.co_name)
            name = f"{code.co_qualname} after line {_line_before(layout)}"
            step = self._steps[key] = self._make(fn, name)
        return step

    def steps(self) -> list[Any]:
        """The compiled steps made so far."""
        return list(self._steps.values())


def _line_before(layout: Layout) -> int | str:
    """Line of the instruction that the part comes after."""
    instructions = program_of(layout.code).instructions
    offset = instructions[max(layout.index - 1, 0)].offset
    return next((line or "?" for start, end, line in layout.code.co_lines() if start <= offset < end), "?")


class Frames:
    """The suspended frames behind one entry, ready to go on."""

    def __init__(self, suspension: Suspension, parts: Parts) -> None:
        self._bridges = [
            types.FunctionType(made.code, space, made.code.co_name)
            for made, space in zip(suspension.bridges, suspension.spaces, strict=True)
        ]
        self._spaces = suspension.spaces
        self._parts = parts

    def drive(self, states: tuple[State, ...]) -> Any:
        """Runs the frames to the end of the outermost and returns its value."""
        return self._frame(0, states)

    def suspended(self, states: tuple[State, ...]) -> Again:
        """The frames, left to what drives them once the captured part has returned."""
        return Again(self, states)

    def _frame(self, position: int, states: tuple[State, ...]) -> Any:
        frames: Frames = self
        while True:
            out = frames._cross(position, states)
            if type(out) is not tuple or len(out) != 3 or type(out[0]) is not Landing:
                return out  # a handler of the function's own brought it to its end
            landing, *state = out
            part = frames._parts.after(landing.layout, frames._spaces[position])
            del out  # what the part drops is to be dropped
            try:
                out = part(state)
            finally:
                state.clear()
            if type(out) is not Again:
                return out
            frames, states, position = out.frames, out.states, 0

    def _cross(self, position: int, states: tuple[State, ...]) -> Any:
        """The one instruction of a frame that is not captured."""

        def inner() -> Any:
            try:
                return self._frame(position + 1, states)
            except BaseException as error:  # handlers of the program see its own frames
                error.__traceback__ = of_the_program(error.__traceback__)
                raise

        return self._bridges[position](states[position], inner)


def driven(replay: Callable[..., Any]) -> Callable[..., Any]:
    """A replay that goes on where its part of the step is suspended, when nothing of the part is left."""

    def drive(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = replay(args, kwargs)
        return out.frames.drive(out.states) if type(out) is Again else out

    return drive
