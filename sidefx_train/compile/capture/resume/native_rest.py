"""Decides where the rest of a step can run natively: after its last tensor operation, at a decision on numbers, or at
what would be a graph break.

A guard on such a decision would cause a recapture whenever the decision changes (``if step % 100 == 0``, the phase of a
scheduler), although the graph does not depend on it. So the capture ends before it, and what follows runs as the plain
Python that it is, after the graph and its effects. So does a line for a log file that is opened for it, the reading of
a clock, or a checkpoint.

``optimizer.step(); scheduler.step(); optimizer.zero_grad()``: if the rest began before ``zero_grad``, every gradient
would have to leave the graph. A scheduler does not read gradients, and ``zero_grad`` reads nothing that a scheduler
writes, so the call of the scheduler is deferred, and the rest begins after ``zero_grad``.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sidefx_train.compile.capture.interpreter.frame import COPYING, Frame
from sidefx_train.compile.capture.interpreter.interpreter import Interpreter
from sidefx_train.compile.capture.resume.rest_reads import only_reads
from sidefx_train.compile.capture.resume.suspension import EXECUTE, StopPoint
from sidefx_train.compile.common.sentinels import TRANSPARENT
from sidefx_train.errors import Location, Unsupported

Place = tuple[types.CodeType, int]
"""An instruction of the program, by its code and index."""

_SCHEDULERS, _AVERAGING = "torch.optim.lr_scheduler", "torch.optim.swa_utils"
"""Modules of schedulers, whose code computes with tensors only if a learning rate is one."""

_COMPUTES = frozenset({"backward", "manual_backward", "zero_grad", "clip_grad_norm_"})
"""Names in code that is not host arithmetic, even if the captured call takes another branch."""

_REASON = "decides on numbers only"

_VALUE_CODES = frozenset({"SFX101", "SFX106"})
"""Codes of captures that stopped because the step needs a value that only the graph computes."""

_CALL_CODES = frozenset({"SFX103", "SFX104"})
"""Codes of captures that stopped at a call with effects outside, or at an object of C code: files, clocks, arrays."""

_FINDS_CALLABLE = frozenset(
    {"CALL", "LOAD_ATTR", "LOAD_CONST", "LOAD_DEREF", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_METHOD", "POP_TOP", "PUSH_NULL"}
)
"""Instructions that may lie between the deferred call of a scheduler and ``zero_grad``."""


@dataclass(frozen=True)
class _Decision:
    """The first decision since the last tensor operation.

    Attributes:
        count: number of the instruction from which nothing has touched a tensor.
        depth: number of frames then.
        location: the user's line.
    """

    count: int
    depth: int
    location: Location | None


@dataclass(frozen=True)
class _Call:
    """A call of a scheduler by the program since the last tensor operation.

    Attributes:
        number: its position among such calls of the step, from 1.
        frame: the caller.
        at: index of the call's instruction.
    """

    number: int
    frame: Frame
    at: int


class Decisions:
    """The decisions of one capture on numbers that may change between calls.

    Args:
        interp: the interpreter of the capture.
        graph_decisions: instructions after whose decision another capture has touched a tensor: they belong to the
            graph, and the rest begins after them.
        point: where the capture is to stop, if it is.

    Attributes:
        touched: number of the last instruction that touched a tensor.
        of_graph: instructions that decided before that.
    """

    def __init__(
        self, interp: Interpreter, graph_decisions: frozenset[Place] = frozenset(), point: StopPoint | None = None
    ) -> None:
        self._interp = interp
        self._graph_decisions = graph_decisions
        self._point = point
        self._schedulers = self._resets = 0
        self.touched = self._last = 0
        self.of_graph: set[Place] = set()
        self._begin_again()

    def _begin_again(self) -> None:
        self._first: _Decision | None = None
        self._places: set[Place] = set()
        self._computes = False
        self._calls: list[_Call] = []
        self._known: set[int] = set()
        self._resetting = False
        self._deferring: StopPoint | None = None

    def touch(self) -> None:
        """Records that the running instruction touches a tensor."""
        self.touched = self._last = self._interp.begun
        if not self._resetting and (self._calls or self._places or self._first is not None):
            self.of_graph |= self._places
            self._begin_again()

    def note(self) -> None:
        """Records that the running instruction decides on a number."""
        frame = self._interp.current_frame
        if frame is None:
            return
        places = [] if _in_scheduler(frame) else [(frame.code, frame.pc)]
        if frame.began <= self._last:
            self.of_graph.update(places)
            return
        if not self._graph_decisions.isdisjoint(places):
            self.of_graph |= self._places
            self._last = self._interp.begun
            self._begin_again()
            return
        if places and not self._places:
            self._computes = _compute_later(frame)
        self._places.update(places)
        if self._first is None:
            self._first = self._decision()

    def has_begun(self) -> bool:
        """Returns True if the native rest may begin at a decision before this point: no tensor is touched after it as
        far as is known."""
        return bool(self._calls) or bool(self._places)

    def calls_scheduler(self) -> bool:
        """Records that the program calls a scheduler, which will decide; returns True if the call is to be deferred."""
        frame = self._interp.current_frame
        if frame is None or _in_scheduler(frame):
            return False
        self._schedulers += 1
        if not self._places:
            self._calls.append(_Call(self._schedulers, frame, frame.pc - 1))
            self._known.add(frame.pc - 1)
        if self._point is not None and self._schedulers in self._point.deferred:
            return True
        if self._first is None:
            self._first = self._decision()
        return False

    def begin_reset(self) -> None:
        """Records that the program is about to set gradients to ``None``."""
        self._resets += 1
        frame = self._interp.current_frame
        if frame is None or not self._calls or self._places or any(call.frame is not frame for call in self._calls):
            return
        between = range(min(call.at for call in self._calls) + 1, frame.pc - 1)
        self._resetting = len(between) > 0 and all(self._finds_callable(frame, index) for index in between)
        self._known.add(frame.pc - 1)

    def end_reset(self) -> None:
        """Records that the gradients are ``None``."""
        if not self._resetting:
            return
        self._resetting = False
        point, frames = self._point, list(self._frames())
        if point is not None and point.deferred:
            if point.resets in (0, self._resets):
                self._interp.stop_at = self._interp.begun + 1
        elif frames and frames[-1] is self._interp.current_frame:
            numbers = frozenset(call.number for call in self._calls)
            location = self._first.location if self._first is not None else None
            self._deferring = StopPoint(0, len(frames), "", _REASON, location, True, numbers, self._resets)

    def rest(self, is_part: bool) -> StopPoint | None:
        """Returns where the native rest of the step begins; ``None`` if all of it belongs to the graph.

        Args:
            is_part: the step is the rest of another, in which nothing notes what the program's own decisions lead to.
        """
        first = self._first
        if first is None or self._computes or (is_part and self._places):
            return None
        return self._deferring or StopPoint(first.count, first.depth, "", _REASON, first.location, native=True)

    def stopped(self, frames: list[Frame], stop: Unsupported) -> tuple[StopPoint, ...]:
        """Returns where a native rest may begin if the capture has stopped after the last tensor operation.

        Args:
            frames: the frames that can be suspended, outermost first.
            stop: what stopped the capture.
        """
        depth = next((i for i, frame in enumerate(frames) if _is_scheduler(frame)), 0)
        if not depth:
            return self._stopped_behind(frames, stop)
        if frames[depth - 1].began <= self._last:
            return ()
        caller = frames[depth - 1]
        here = StopPoint(caller.began, depth, "", stop.reason, stop.location, native=True)
        if not self._calls or self._calls[-1].frame is not caller or not _resets_next(caller):
            return (here,)
        return (replace(here, count=0, deferred=frozenset({self._calls[-1].number})), here)

    def _stopped_behind(self, frames: list[Frame], stop: Unsupported) -> tuple[StopPoint, ...]:
        """Returns where a native rest may begin if the step reads a value that the graph computes (``if loss < best``),
        writes to a file or a NumPy array, or reads a clock, and its code does not compute with tensors after that."""
        depth = next((i for i, frame in enumerate(frames) if frame.began > self._last), None)
        is_native = stop.code in _VALUE_CODES or (stop.code in _CALL_CODES and self.touched > 0)
        if not is_native or depth is None:
            return ()
        if _compute_later(frames[-1]) or not all(only_reads(frame, i > depth) for i, frame in enumerate(frames)):
            return ()
        first = self._first or _Decision(frames[depth].began, depth + 1, stop.location)
        return (StopPoint(first.count, first.depth, "", f"{_why(stop)}{stop.reason}", first.location, native=True),)

    def _finds_callable(self, frame: Frame, index: int) -> bool:
        name = frame.instructions[index].name
        return name in _FINDS_CALLABLE and (name != "CALL" or index in self._known)

    def _decision(self) -> _Decision | None:
        frames = list(self._frames())
        depth = next((i for i, frame in enumerate(frames) if frame.began > self._last), None)
        if depth is None:
            return None
        return _Decision(frames[depth].began, depth + 1, self._interp.location())

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


def _why(stop: Unsupported) -> str:
    return "decides on a value: " if stop.code in _VALUE_CODES else ""


def _is_scheduler(frame: Frame) -> bool:
    module = frame.globals.get("__name__")
    return module == _SCHEDULERS or (module == _AVERAGING and frame.code.co_qualname.startswith("SWALR."))


def _in_scheduler(frame: Frame | None) -> bool:
    while frame is not None and not _is_scheduler(frame):
        frame = frame.back
    return frame is not None


def _compute_later(frame: Frame | None) -> bool:
    """Returns True if the rest of the code of a frame, or of one of its callers, looks up a name in
    :data:`_COMPUTES`."""
    while frame is not None:
        for instr in frame.instructions[frame.pc :]:
            if instr.name in ("LOAD_ATTR", "LOAD_METHOD") and instr.value in _COMPUTES:
                return True
        frame = frame.back
    return False


def _resets_next(frame: Frame) -> bool:
    """Returns True if the next call in a frame's code is that of ``zero_grad``."""
    for instr in frame.instructions[frame.pc :]:
        if instr.name in ("LOAD_ATTR", "LOAD_METHOD") and instr.value == "zero_grad":
            return True
        if instr.name == "CALL" or instr.name not in _FINDS_CALLABLE:
            return False
    return False
