"""What runs between two parts of a step: bridges natively, and parts captured in turn."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from sidefx_train.compile.capture.interpreter.dispatch import code_info
from sidefx_train.compile.capture.interpreter.exceptions import of_the_program
from sidefx_train.compile.capture.resume.bridge import Landing
from sidefx_train.compile.capture.resume.frame_layout import Layout
from sidefx_train.compile.capture.resume.resume_function import continuation, function
from sidefx_train.compile.capture.resume.suspension import State, Suspension


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
            fn = function(code, space)
            name = f"{code.co_qualname} after line {_line_before(layout)}"
            step = self._steps[key] = self._make(fn, name)
        return step

    def steps(self) -> list[Any]:
        """The compiled steps made so far."""
        return list(self._steps.values())


def _line_before(layout: Layout) -> int | str:
    """Line of the instruction that the part comes after."""
    instructions = code_info(layout.code).instructions
    offset = instructions[max(layout.index - 1, 0)].offset
    return next((line or "?" for start, end, line in layout.code.co_lines() if start <= offset < end), "?")


class Frames:
    """The suspended frames behind one entry, ready to go on."""

    def __init__(self, suspension: Suspension, parts: Parts) -> None:
        self._bridges = [
            function(made.code, space) for made, space in zip(suspension.bridges, suspension.spaces, strict=True)
        ]
        self._spaces = suspension.spaces
        self._parts = parts

    def drive(self, states: tuple[State, ...]) -> Any:
        """Runs the frames to the end of the outermost and returns its value."""
        crossing = Crossing(self, 0, states)
        while (bridge := crossing()) is not None:
            crossing.out = bridge()
        return crossing.out

    def suspended(self, states: tuple[State, ...]) -> Again:
        """The frames, left to what drives them once the captured part has returned."""
        return Again(self, states)

    def bridge(self, position: int, states: tuple[State, ...]) -> Callable[[], Any]:
        """The one instruction of a frame that is not captured; called, its frame stands right above the caller's."""
        inner = Crossing(self, position + 1, states)
        return functools.partial(self._bridges[position], states[position], inner)

    def part(self, landing: Landing, position: int) -> Callable[..., Any]:
        """The captured rest of a frame."""
        return self._parts.after(landing.layout, self._spaces[position])


class Crossing:
    """A suspended frame on its way to its end, in turns: bridges, which the frame outside calls, and parts, run here.

    The bridge of an outer frame holds the loop, so that no frame of ours stands between two of the program's::

        while (bridge := crossing()) is not None:
            crossing.out = bridge()
        crossing.out  # what the frame returns

    Args:
        frames: the suspended frames.
        position: which of them.
        states: what they hold.
    """

    __slots__ = ("_began", "_frames", "_position", "_states", "out")

    def __init__(self, frames: Frames, position: int, states: tuple[State, ...]) -> None:
        self._frames, self._position, self._states = frames, position, states
        self._began = False
        self.out: Any = None

    def __call__(self) -> Callable[[], Any] | None:
        """The next bridge; ``None`` at the frame's end."""
        if self._began:
            out, self.out = self.out, None
            if type(out) is not tuple or len(out) != 3 or type(out[0]) is not Landing:
                self.out = out  # a handler of the function's own brought it to its end
                return None
            landing, *state = out
            del out  # what the part drops is to be dropped
            part = self._frames.part(landing, self._position)
            try:
                out = part(state)
            except BaseException as error:  # handlers of the program see its own frames
                error.__traceback__ = of_the_program(error.__traceback__)
                raise
            finally:
                state.clear()
            if type(out) is not Again:
                self.out = out
                return None
            self._frames, self._states, self._position = out.frames, out.states, 0
        self._began = True
        return self._frames.bridge(self._position, self._states)


def driven(replay: Callable[..., Any]) -> Callable[..., Any]:
    """A replay that goes on where its part of the step is suspended, when nothing of the part is left."""

    def drive(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = replay(args, kwargs)
        return out.frames.drive(out.states) if type(out) is Again else out

    return drive
