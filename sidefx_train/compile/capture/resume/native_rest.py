"""Decides where the rest of a step can run natively: after its last tensor operation, at a decision on numbers.

A guard on such a decision would cause a recapture whenever the decision changes (``if step % 100 == 0``, the phase of a
scheduler), although the graph does not depend on it. So the capture ends before it, and what follows runs as the plain
Python that it is, after the graph and its effects.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass

from sidefx_train.compile.capture.interpreter.frame import COPYING, Frame
from sidefx_train.compile.capture.interpreter.interpreter import Interpreter
from sidefx_train.compile.capture.resume.suspension import EXECUTE, TRANSPARENT, StopPoint
from sidefx_train.errors import Location, Unsupported

Place = tuple[types.CodeType, int]
"""An instruction of the program, by its code and index."""

_SCHEDULERS, _AVERAGING = "torch.optim.lr_scheduler", "torch.optim.swa_utils"
"""Modules of schedulers, whose code computes with tensors only if a learning rate is one."""

_COMPUTES = frozenset({"backward", "manual_backward", "zero_grad", "clip_grad_norm_"})
"""Names in code that is not host arithmetic, even if the captured call takes another branch."""


@dataclass(frozen=True)
class _Decision:
    """The first decision since the last tensor operation.

    Attributes:
        count: number of the instruction from which nothing has touched a tensor.
        depth: number of frames then.
        location: the user's line.
        computes: code after it, in one of these frames, computes with tensors.
    """

    count: int
    depth: int
    location: Location | None
    computes: bool


class Decisions:
    """The decisions of one capture on numbers that may change between calls.

    Args:
        interp: the interpreter of the capture.

    Attributes:
        touched: number of the last instruction that touched a tensor.
        of_graph: instructions that decided before that.
    """

    def __init__(self, interp: Interpreter) -> None:
        self._interp = interp
        self._first: _Decision | None = None
        self._places: set[Place] = set()
        self.touched = 0
        self.of_graph: set[Place] = set()

    def touch(self) -> None:
        """Records that the running instruction touches a tensor."""
        self.touched = self._interp.begun
        self._first = None
        if self._places:
            self.of_graph |= self._places
            self._places = set()

    def note(self, of_scheduler: bool = False) -> None:
        """Records that the running instruction decides on a number, or calls a scheduler, which will."""
        frame = self._interp.current_frame
        if frame is None:
            return
        places = [] if of_scheduler or _is_host(frame) else [(frame.code, frame.pc)]
        if frame.began <= self.touched:
            self.of_graph.update(places)
            return
        self._places.update(places)
        if self._first is None:
            self._first = self._decision()

    def rest(self, known: frozenset[Place], is_part: bool) -> StopPoint | None:
        """Returns where the native rest of the step begins; ``None`` if all of it belongs to the graph.

        Args:
            known: instructions after whose decision another call has touched a tensor.
            is_part: the step is the rest of another, in which nothing notes what the program's own decisions lead to.
        """
        first = self._first
        if first is None or first.computes or not known.isdisjoint(self._places) or (is_part and self._places):
            return None
        return StopPoint(first.count, first.depth, "", "decides on numbers only", first.location, native=True)

    def _decision(self) -> _Decision | None:
        frames = list(self._frames())
        depth = next((i for i, frame in enumerate(frames) if frame.began > self.touched), None)
        if depth is None:
            return None
        computes = any(_mentions(frame, _COMPUTES) for frame in frames[depth:])
        return _Decision(frames[depth].began, depth + 1, self._interp.location(), computes)

    def _frames(self) -> Iterator[Frame]:
        """Yields the frames that can be suspended, outermost first."""
        found: list[Frame | None] = []
        trace: types.FrameType | None = sys._getframe()
        while trace is not None:
            if trace.f_code is EXECUTE:
                found.append(trace.f_locals["frame"] if trace.f_locals["self"] is self._interp else None)
            elif trace.f_code not in TRANSPARENT:
                found.append(None)
            trace = trace.f_back
        while found and found[-1] is None:
            found.pop()
        for frame in reversed(found):
            if frame is None or frame.code in COPYING:
                return
            yield frame


def scheduler_call(frames: list[Frame], touched: int, stop: Unsupported) -> tuple[StopPoint, ...]:
    """Returns the call of a learning rate scheduler in which a capture stopped, if the rest may begin there.

    Args:
        frames: the frames that can be suspended, outermost first.
        touched: number of the last instruction that touched a tensor.
        stop: what stopped the capture.
    """
    inner = next((i for i, frame in enumerate(frames) if _is_host(frame)), 0)
    if not inner or frames[inner - 1].began <= touched:
        return ()
    return (StopPoint(frames[inner - 1].began, inner, "", stop.reason, stop.location, native=True),)


def _is_host(frame: Frame) -> bool:
    module = frame.globals.get("__name__")
    return module == _SCHEDULERS or (module == _AVERAGING and frame.code.co_qualname.startswith("SWALR."))


def _mentions(frame: Frame, names: frozenset[str]) -> bool:
    """Returns True if the rest of a frame's code looks up one of these attributes."""
    if _is_host(frame):
        return False
    later = frame.instructions[frame.pc :]
    return any(instr.name in ("LOAD_ATTR", "LOAD_METHOD") and instr.value in names for instr in later)
