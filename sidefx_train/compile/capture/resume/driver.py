"""Runs the steps between two parts: bridges natively, and captured parts."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Protocol

from sidefx_train.compile.capture.interpreter.dispatch import code_info
from sidefx_train.compile.capture.interpreter.exceptions import of_the_program
from sidefx_train.compile.capture.resume.branch_history import BranchHistory
from sidefx_train.compile.capture.resume.bridge import Landing
from sidefx_train.compile.capture.resume.frame_layout import Layout
from sidefx_train.compile.capture.resume.resume_function import continuation, function
from sidefx_train.compile.capture.resume.suspension import State, Suspension
from sidefx_train.compile.common.type_checks import set_field


class Again:
    """Result of a suspended part: the driver continues its outermost frame."""

    __slots__ = ("frames", "states")

    def __init__(self, frames: Frames, states: tuple[State, ...]) -> None:
        self.frames = frames
        self.states = states


class Parts:
    """The resume functions of one step, each a compiled step of its own, created on first use.

    Args:
        make: ``make(fn, name)`` compiles a resume function.

    Attributes:
        history: which way the branches between the parts went.
        pass_items: some part passes on items that are a tensor in some calls and ``None`` in others.
    """

    def __init__(self, make: Callable[[types.FunctionType, str], Callable[..., Any]]) -> None:
        self._make = make
        self.history = BranchHistory()
        self.pass_items = False
        self._steps: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def after(self, layout: Layout, space: dict[str, Any]) -> Callable[..., Any]:
        """Returns the compiled rest of a function."""
        key = layout.key
        step = self._steps.get(key)
        if step is None:
            code = continuation(layout)
            fn = function(code, space)
            name = f"{code.co_qualname} after line {_line_before(layout)}"
            step = self._steps[key] = self._make(fn, name)
        return step

    def steps(self) -> list[Any]:
        """Returns the compiled steps created so far."""
        return list(self._steps.values())


def _line_before(layout: Layout) -> int | str:
    """Returns the line of the instruction before the part."""
    instructions = code_info(layout.code).instructions
    offset = instructions[max(layout.index - 1, 0)].offset
    return next((line or "?" for start, end, line in layout.code.co_lines() if start <= offset < end), "?")


class Frames:
    """The suspended frames of one cache entry, ready to continue.

    Args:
        suspension: the frames.
        parts: the parts of the step.
        make_watch: makes what notices that the frames of a part, which run natively, compute with tensors; ``None`` if
            nothing is to notice that here.

    Attributes:
        make_watch: the same; ``None`` if they do not run natively.
    """

    def __init__(self, suspension: Suspension, parts: Parts, make_watch: Callable[[], Watch] | None = None) -> None:
        self.make_watch = make_watch if suspension.point.native else None
        self._bridges = [
            function(made.code, space) for made, space in zip(suspension.bridges, suspension.spaces, strict=True)
        ]
        self._spaces = suspension.spaces
        self._made = suspension.bridges
        self._parts = parts
        self._native = suspension.point.native
        self._rests: dict[Landing, Callable[..., Any]] = {}

    def drive(self, states: tuple[State, ...]) -> Any:
        """Runs the frames until the outermost returns, and returns its value."""
        watched = Watched()
        crossing = Crossing(self, 0, states, watched)
        try:
            while (bridge := crossing()) is not None:
                crossing.out = bridge()
        finally:
            watched.end()
        return crossing.out

    def suspended(self, states: tuple[State, ...]) -> Again:
        """Returns the frames for the driver, which continues them after the captured part has returned."""
        return Again(self, states)

    def bridge(self, position: int, states: tuple[State, ...], watched: Watched) -> Callable[[], Any]:
        """Returns a function that runs one uncaptured instruction; its frame is directly above the caller's."""
        if self._native and position == len(self._bridges) - 1:
            return functools.partial(self._bridges[position], states[position])
        inner = Crossing(self, position + 1, states, watched)
        return functools.partial(self._bridges[position], states[position], inner)

    def native_rest(self, landing: Landing, position: int, state: list[Any]) -> Callable[[], Any] | None:
        """Returns a function that runs the rest of a frame, which is not captured; ``None`` if it is."""
        if not self._native:
            return None
        rest = self._rests.get(landing)
        if rest is None:
            rest = self._rests[landing] = function(continuation(landing.layout), self._spaces[position])
        return functools.partial(rest, state)

    def note(self, position: int, landing: Landing) -> None:
        """Records the way of a branch that a bridge has run."""
        made = self._made[position]
        if made.branch is not None:
            self._parts.history.note(made.branch, made.jumps_if is (landing is made.landings[0]))

    def part(self, landing: Landing, position: int) -> Callable[..., Any]:
        """Returns the captured rest of a frame."""
        return self._parts.after(landing.layout, self._spaces[position])


class Watch(Protocol):
    """What notices that a native rest computes with tensors, and says so at its end."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class Watched:
    """The watch of a native rest of a part, during one call of the step."""

    __slots__ = ("_watch",)

    def __init__(self) -> None:
        self._watch: Watch | None = None

    def begin(self, make_watch: Callable[[], Watch] | None) -> None:
        """Watches a native rest that begins."""
        if make_watch is not None:
            self._watch = make_watch()
            self._watch.begin()

    def end(self) -> None:
        """Ends the watch, if there is one: the rest has returned, or an exception has left it."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()


class Crossing:
    """Runs a suspended frame to its end by alternating bridges, which the outer frame calls, and parts, called here.

    The bridge of an outer frame contains the loop, so that no frame of this library lies between two of the program's::

        while (bridge := crossing()) is not None:
            crossing.out = bridge()
        crossing.out  # what the frame returns

    Args:
        frames: the suspended frames.
        position: index of the frame.
        states: their states.
        watched: notices what native rests of parts compute.
    """

    __slots__ = ("_began", "_frames", "_position", "_states", "_watched", "out")

    def __init__(self, frames: Frames, position: int, states: tuple[State, ...], watched: Watched) -> None:
        self._frames, self._position, self._states, self._watched = frames, position, states, watched
        self._began = False
        self.out: Any = None

    def __call__(self) -> Callable[[], Any] | None:
        """Returns the next bridge; ``None`` at the frame's end."""
        if self._began:
            out, self.out = self.out, None
            finished = type(out) is not tuple or len(out) != 3 or type(out[0]) is not Landing
            if self._frames.make_watch is None or (finished and self._position == 0):
                self._watched.end()
            if finished:
                self.out = out  # a handler of the function itself has finished it
                return None
            landing, *state = out
            del out  # release what the part drops
            self._frames.note(self._position, landing)
            native = self._frames.native_rest(landing, self._position, state)
            if native is not None:
                return native
            part = self._frames.part(landing, self._position)
            try:
                out = part(state)
            except BaseException as error:  # handlers of the program see its own frames
                set_field(error, "__traceback__", of_the_program(error.__traceback__))
                raise
            finally:
                state.clear()
            if type(out) is not Again:
                self.out = out
                return None
            self._frames, self._states, self._position = out.frames, out.states, 0
            self._watched.begin(out.frames.make_watch)
        self._began = True
        return self._frames.bridge(self._position, self._states, self._watched)


def driven(
    replay: Callable[..., Any],
    run_rest: Callable[[Callable[[], Any]], Any] | None,
    ended: Callable[[], None],
) -> Callable[..., Any]:
    """Wraps a replay: if its part is suspended, the driver continues it after the part has been released.

    Args:
        replay: the replay.
        run_rest: calls a function without arguments that runs the rest of the step natively, and returns its result;
            ``None`` if the rest is captured.
        ended: called when a captured rest has returned.
    """

    def drive(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = replay(args, kwargs)
        if type(out) is not Again:
            return out
        if run_rest is None:
            result = out.frames.drive(out.states)
            ended()
            return result
        return run_rest(functools.partial(out.frames.drive, out.states))

    return drive
