"""Where a capture stopped, and the state of the step's frames before that instruction."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sidefx_train.compile.capture.interpreter.dispatch import code_info
from sidefx_train.compile.capture.interpreter.frame import COPYING, NULL, Frame
from sidefx_train.compile.capture.interpreter.generator_finalizers import has_pending_finally
from sidefx_train.compile.capture.interpreter.interpreter import Interpreter
from sidefx_train.compile.capture.resume.bridge import Bridge, bridge, bridge_over
from sidefx_train.compile.capture.resume.frame_layout import Layout, Slot
from sidefx_train.compile.capture.resume.liveness import live_slots, own_effect
from sidefx_train.compile.capture.resume.resume_function import continuation, layout_at, original
from sidefx_train.compile.capture.resume.statements import DataCalls, Statement, bound_at_end, data_statement
from sidefx_train.compile.capture.resume.with_blocks import block_at, bound_at_exits, enclosing
from sidefx_train.compile.common.sentinels import TRANSPARENT
from sidefx_train.errors import Location, Unsupported

EXECUTE = Interpreter.execute.__code__
_MAX_DEPTHS = 3
"""Limit of frames, from the innermost outwards, in which suspending a stopped capture is tried."""

State = list[tuple[Any, ...]]
"""``[cells, values]`` of a frame: its code removes them from the list."""


@dataclass(frozen=True)
class StopPoint:
    """An instruction to stop before, by number.

    Attributes:
        count: number of instructions begun by then.
        depth: number of frames.
        code: code of the break.
        reason: reason of the break.
        location: the user's line.
        native: what follows is not captured in parts, but runs natively to its end.
        deferred: calls of schedulers, by their number, that are deferred to the end of the graph.
        block: the instruction begins a ``with`` statement, which runs natively as a whole.
        statement: the statement that it begins, which does.
        resets: if there are any, stop after this reset of gradients, or the first after them if 0; not at ``count``.
    """

    count: int
    depth: int
    code: str
    reason: str
    location: Location | None
    native: bool = False
    deferred: frozenset[int] = frozenset()
    resets: int = 0
    block: bool = False
    statement: Statement | None = None


@dataclass(frozen=True)
class Suspension:
    """The frames of a suspended step, outermost first.

    Attributes:
        point: the stop point.
        bridges: the bridge of each frame.
        spaces: the globals of each frame.

    If ``point.native``, the last bridge is the whole rest of its frame.
    """

    point: StopPoint
    bridges: tuple[Bridge, ...]
    spaces: tuple[dict[str, Any], ...]


def stop_points(
    error: BaseException,
    code: str,
    reason: str,
    location: Location | None,
    data: DataCalls | None = None,
) -> tuple[StopPoint, ...]:
    """Returns the instructions before which the step can be suspended: of each frame, from the innermost, the one that
    it has begun, and those that began the ``with`` statements around that.

    Args:
        error: the error that stopped the capture, with its traceback.
        code: code for the report.
        reason: reason for the report.
        location: line for the report.
        data: if given, before them, of the innermost frame that allows it, the one that began the statement, if that
            only handles data and calls these.
    """
    found: list[StopPoint] = []
    frames = [*enumerate(frames_of(error), 1)][-_MAX_DEPTHS:]
    if data is not None:
        for depth, frame in reversed(frames):
            known = _data_statement(frame, data)
            if known is not None:
                found.append(StopPoint(known[1], depth, code, reason, location, statement=known[0]))
                break
        frames.sort(key=lambda each: not data.is_inside(each[1].code))  # callers first
    for depth, frame in reversed(frames):
        found.append(StopPoint(frame.began, depth, code, reason, location))
        for count in _counts_of_blocks(frame):
            why = f"{reason}; the with statement around it runs natively"
            found.append(StopPoint(count, depth, code, why, location, block=True))
    return tuple(found)


def _counts_of_blocks(frame: Frame) -> Iterator[int]:
    """Yields the numbers of the instructions that began the ``with`` statements around the current one, from the
    innermost."""
    try:
        code, at = original(frame.info.code, frame.pc - 1)
    except Unsupported:
        return
    blocks = enclosing(code, at)
    if blocks:
        counts = _counts(frame)
        yield from (counts[block.start] for block in blocks if block.start in counts)


def _data_statement(frame: Frame, data: DataCalls) -> tuple[Statement, int] | None:
    """Returns the current statement, if it only handles data, and the number of the instruction that began it."""
    if data.is_inside(frame.code):
        return None
    try:
        code, at = original(frame.info.code, frame.pc - 1)
    except Unsupported:
        return None
    counts = _counts(frame)
    first = min(counts, key=lambda index: counts[index], default=at)
    bound = dict(_values(frame, code_info(code).slots))
    found = data_statement(code, at, first, frame.globals, data, lambda slot: data.holds_items(bound[slot]))
    return None if found is None or found.start not in counts else (found, counts[found.start])


def _counts(frame: Frame) -> dict[int, int]:
    """Returns by index of the original code the number of the last time that an instruction was begun."""
    counts = {}
    for index, count in frame.counts.items():
        with suppress(Unsupported):  # of what restores a frame
            counts[original(frame.info.code, index)[1]] = count
    return counts


def frames_of(error: BaseException) -> list[Frame]:
    """Returns the frames, outermost first, that can be suspended where an error stopped the capture."""
    found: list[Frame] = []
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not EXECUTE:
        trace = trace.tb_next
    while trace is not None:
        frame: Frame = trace.tb_frame.f_locals["frame"]
        if frame.code in COPYING:
            break
        found.append(frame)
        trace = trace.tb_next
        while trace is not None and trace.tb_frame.f_code is not EXECUTE:
            if trace.tb_frame.f_code not in TRANSPARENT:
                return found
            trace = trace.tb_next
    return found


def suspend(
    frames: list[Frame], handled: BaseException | None, point: StopPoint, watched: Callable[[Any], bool]
) -> tuple[Suspension, tuple[State, ...]]:
    """Describes frames that are stopped before an instruction each.

    Args:
        frames: outermost first; all but the last have entered a call.
        handled: the exception being handled.
        point: the stop point.
        watched: returns True if the program can observe the finalization of an object.

    Returns:
        The frames, and their states in values of the trace: ``[cells, values]`` for each.

    Raises:
        Unsupported: a frame cannot continue natively.
    """
    bridges: list[Bridge] = []
    states: list[State] = []
    for frame in reversed(frames):
        entered = frame is not frames[-1]
        index = frame.pc - 1 if entered else frame.pc
        made, state, handled = _frame(frame, index, entered, handled, watched, None if entered else point)
        bridges.insert(0, made)
        states.insert(0, state)
    return Suspension(point, tuple(bridges), tuple(f.globals for f in frames)), tuple(states)


def _frame(
    frame: Frame,
    index: int,
    entered: bool,
    handled: BaseException | None,
    watched: Callable[[Any], bool],
    point: StopPoint | None,
) -> tuple[Bridge, State, BaseException | None]:
    """Returns the bridge over a frame's instruction or ``with`` statement, or the rest of the frame; the frame's state;
    and the exception its caller handles.

    ``point`` is that of the innermost frame, ``None`` for others.
    """
    layout, needed, state, handled = describe(frame, index, entered, handled, watched)
    if point is not None and point.native:
        return Bridge(continuation(layout), ()), state, handled
    if point is None or not (point.block or point.statement):
        return bridge(layout, entered, needed), state, handled
    code = layout.code
    slots = code_info(code).slots
    bound = {i for i, value in _values(frame, slots) if value is not NULL}
    if point.block:
        surely, perhaps = bound_at_exits(code, block_at(code, layout.index), bound)
    else:
        assert point.statement is not None, "one of the two"
        surely, perhaps = bound_at_end(code, point.statement, bound)
    after: dict[int, tuple[str, ...]] = {}
    for i, known in surely.items():
        after[i] = needed(i, {slots[slot] for slot in known})
        unknown = set(needed(i, {slots[slot] for slot in perhaps})) - set(after[i])
        if unknown:
            raise Unsupported("SFX111", f"{min(unknown)} may be unbound after the statement that runs natively")
    return bridge_over(layout, after, jumps=point.statement is not None), state, handled


def describe(
    frame: Frame,
    index: int,
    entered: bool,
    handled: BaseException | None,
    watched: Callable[[Any], bool],
    given: int = 0,
) -> tuple[Layout, Callable[..., tuple[str, ...]], State, BaseException | None]:
    """Describes the position and kept state of a frame.

    Args:
        frame: the frame.
        index: its next instruction.
        entered: the instruction is a call whose operands are popped.
        handled: the exception handled inside.
        watched: returns True if the program can observe the finalization of an object.
        given: number of values that will be pushed additionally.

    Returns:
        The layout; a function for the live variables before another instruction, of those that it is told are bound, by
        default those that are bound when that instruction follows; ``[cells, values]``; the exception handled outside.

    Raises:
        Unsupported: the frame cannot be entered there.
    """
    info = frame.info
    code, at = original(info.code, index)
    own = code_info(code)
    cell_slots = _cell_slots(code)
    bound = {own.slots[i]: value for i, value in _values(frame, own.slots) if value is not NULL}

    stored, unbound = own_effect(own.instructions[at])
    if (
        stored and not entered and not given and frame.stack[-1] is NULL
    ):  # a comprehension gives an unbound variable back
        stored, unbound = unbound, stored
    bound_after = {*bound, *(own.slots[i] for i in stored)} - {own.slots[i] for i in unbound}

    # A value with observable finalization lives as long as its variable, even if it is not read again.
    held = [(i, bound[name]) for i, name in enumerate(own.slots) if name in bound]
    kept = {i for i, value in held if has_pending_finally(value) or watched(value)}

    def needed(position: int, known: Any = bound_after) -> tuple[str, ...]:
        live = live_slots(own, position) | kept
        return tuple(own.slots[i] for i in sorted(live) if i not in cell_slots and own.slots[i] in known)

    cells = tuple(own.slots[i] for i in sorted(cell_slots))
    for name in cells:
        if type(bound.get(name)) is not types.CellType:
            raise Unsupported("SFX111", f"the variable {name} is not a cell yet")
    if any(instr.name == "SET_FUNCTION_ATTRIBUTE" for instr in own.instructions[at : at + 2]):  # incomplete after it
        raise Unsupported("SFX111", "a function is being created")
    nulls = (*(value is NULL for value in frame.stack), *[False] * given)
    layout = layout_at(code, at, needed(at, bound), cells, nulls, entered)
    stack = list(frame.stack)
    for position in reversed(range(len(stack))):
        if layout.stack[position] is Slot.HANDLED:  # saves the outer handled exception; pass the inner
            stack[position], handled = handled, stack[position]
    values = tuple(bound[name] for name in layout.names) + tuple(v for v in stack if v is not NULL)
    return layout, needed, [tuple(bound[name] for name in cells), values], handled


def _values(frame: Frame, names: tuple[str, ...]) -> list[tuple[int, Any]]:
    """Returns the variables of the original code, from a frame of it or of a continuation."""
    if frame.info.slots == names:
        return list(enumerate(frame.locals))
    by_name = dict(zip(frame.info.slots, frame.locals, strict=True))
    return [(i, by_name.get(name, NULL)) for i, name in enumerate(names)]


def _cell_slots(code: types.CodeType) -> frozenset[int]:
    slots = code_info(code).slots
    cells = set(code.co_cellvars) | set(code.co_freevars)
    return frozenset(i for i, name in enumerate(slots) if name in cells)
