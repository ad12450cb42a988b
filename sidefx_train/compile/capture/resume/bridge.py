"""Bridges: one instruction of a frame, or one ``with`` statement, as a function of the frame's state."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import bytecode as bc

from sidefx_train.compile.capture.interpreter import bytecode_versions
from sidefx_train.compile.capture.interpreter.dispatch import code_info
from sidefx_train.compile.capture.resume.branch_history import Branch
from sidefx_train.compile.capture.resume.frame_layout import (
    CALLS,
    INNER,
    STATE,
    Body,
    Layout,
    Slot,
    assemble,
    operand_count,
    prelude,
)
from sidefx_train.errors import Unsupported

_ENDS = frozenset({"RAISE_VARARGS", "RERAISE", "RETURN_VALUE", "RETURN_CONST"})
JUMPS = {"POP_JUMP_IF_FALSE": False, "POP_JUMP_IF_TRUE": True}
"""Jumps on a condition, with the truth for which they jump."""
_PUSH_RESULT = frozenset({"FOR_ITER", "WITH_EXCEPT_START"})
_PUSH_WHAT_THEY_FIND = frozenset({"LOAD_FAST_AND_CLEAR", "SEND"})


@dataclass(frozen=True, eq=False)
class Landing:
    """First item of a bridge's result if what it runs has finished: ``(landing, cells, values)``."""

    layout: Layout


@dataclass(frozen=True)
class Bridge:
    """One instruction or ``with`` statement of a frame as a function of the frame's state.

    Attributes:
        code: function code; takes the state and, for a frame that has entered a call, the ``Crossing`` of the inner
            frames.
        landings: the possible states after the instruction; of a jump, first that at its target.
        branch: the instruction, if it jumps on a condition.
        jumps_if: the truth of the condition for which it jumps.
    """

    code: types.CodeType
    landings: tuple[Landing, ...]
    branch: Branch | None = None
    jumps_if: bool = False


def bridge(layout: Layout, entered: bool, bound_after: Callable[[int], tuple[str, ...]]) -> Bridge:
    """Returns a bridge that runs the instruction at ``layout.index`` natively.

    Args:
        layout: the frame before the instruction; after popping its operands if ``entered``.
        entered: the instruction is a call whose callee is suspended too.
        bound_after: returns the bound and live variables before the instruction with the given index.

    Raises:
        Unsupported: the instruction cannot be run this way.
    """
    body = Body(layout.code)
    index = layout.index
    unit = body.units[index]
    location = unit.location
    info = code_info(layout.code)
    instr = info.instructions[index]
    items: list[Any] = prelude(layout, location, keep_cells=True)
    landings: list[Landing] = []
    tail: list[Any] = []
    nulls = tuple(slot is Slot.NULL for slot in layout.stack)

    def landing(target: int, nulls: tuple[bool, ...]) -> list[Any]:
        stack = body.stack(target, nulls)
        made = Landing(Layout(layout.code, target, bound_after(target), layout.cells, stack))
        landings.append(made)
        return _pack(made, location)

    group = [item.copy() for item in body.groups[index]]
    if entered:
        group = _drive_inner(location)
        after: tuple[bool, ...] = (*nulls, False)
    elif unit.name == "LOAD_SUPER_ATTR" or instr.name == "LOAD_METHOD":
        group, after = _plain_attribute(unit, nulls)
    elif unit.name == "LOAD_SPECIAL":
        group, after = _bound_special_method(unit), (*nulls[:-1], False, True)
    else:
        given = (False, False) if index in body.super_calls else ()
        after = _stack_after(unit, (*nulls, *given), jump=False)
    covering = body.tries[index]
    if covering is not None:
        opened = bc.TryBegin(covering.target, covering.push_lasti, covering.stack_depth)
        # The handler of a callee's error is looked up one unit before the call, where a compiler has its operands.
        items += [opened, bc.Instr("NOP", location=location)]
    last = group[-1]
    if not entered and isinstance(last.arg, bc.Label):
        there = bc.Label()
        if unit.name == "FOR_ITER":
            nulls_on_stack = nulls[:-1]
            skip = [bc.Instr(name, location=location) for name in bytecode_versions.FOR_ITER_END]
        else:
            nulls_on_stack, skip = _stack_after(unit, nulls, jump=True), []
        tail = [there, *skip, *landing(instr.target, nulls_on_stack)]
        group[-1] = bc.Instr(last.name.replace("BACKWARD", "FORWARD"), there, location=location)
    items += group
    if covering is not None:
        items.append(bc.TryEnd(opened))
    if unit.name not in _ENDS and instr.name != "JUMP":
        items += landing(index + 1, after)
    items += tail
    items += body.items
    made = assemble(layout, body, items, [STATE, INNER])
    branch = (layout.code, index) if instr.name in JUMPS and not entered else None
    return Bridge(made, tuple(landings), branch, JUMPS.get(instr.name, False))


def bridge_over(layout: Layout, bound_after: Mapping[int, tuple[str, ...]], jumps: bool) -> Bridge:
    """Returns a bridge that runs the instructions from ``layout.index`` to an end of the same statement.

    After an exception that the statement swallows, or any other way out of it, the function runs natively to its end.

    Args:
        layout: the frame before the statement.
        bound_after: the instructions that follow it, with the bound and live variables before them; they may take a
            value from the stack, which is on top then.
        jumps: jumps to these instructions end the statement too; otherwise only going on to them does.
    """
    body = Body(layout.code)
    location = body.units[layout.index].location
    nulls = tuple(slot is Slot.NULL for slot in layout.stack)
    here = bc.Label()
    items: list[Any] = [*prelude(layout, location, keep_cells=True), bc.Instr("JUMP_FORWARD", here, location=location)]
    ends = {id(body.groups[index][0] if jumps else body.groups[index - 1][-1]): index for index in bound_after}
    landings: list[Landing] = []
    for item in body.items:
        if item is body.groups[layout.index][0]:
            items.append(here)
        packed: list[Any] = []
        if id(item) in ends:
            index = ends[id(item)]
            known = body.levels[index]
            assert known is not None, "what follows a statement can be reached"
            stack = body.stack(index, (*nulls, *[False] * (known[0] - len(nulls))))
            landing = Landing(Layout(layout.code, index, bound_after[index], layout.cells, stack))
            landings.append(landing)
            packed = _pack(landing, item.location)
        items += [*packed, item] if jumps else [item, *packed]
    return Bridge(assemble(layout, body, items, [STATE, INNER]), tuple(landings))


def _drive_inner(location: Any) -> list[Any]:
    """Runs the inner frames to their end, bridge by bridge, and pushes their result."""

    def made(name: str, *arg: Any) -> bc.Instr:
        return bc.Instr(name, *arg, location=location)

    again, done = bc.Label(), bc.Label()
    jump = "POP_JUMP_IF_NONE" if bytecode_versions.VERSION >= (3, 12) else "POP_JUMP_FORWARD_IF_NONE"
    attribute = (False, "out") if bytecode_versions.VERSION >= (3, 12) else "out"
    swap = [] if bytecode_versions.VERSION >= (3, 13) else [made("SWAP", 2)]
    return [
        *[again, *_call_of(made("LOAD_FAST", INNER), location), made("COPY", 1), made(jump, done)],
        *[made("PUSH_NULL"), *swap, *_call_itself(location)],
        *[made("LOAD_FAST", INNER), made("STORE_ATTR", "out"), made("JUMP_BACKWARD", again)],
        *[done, made("POP_TOP"), made("LOAD_FAST", INNER), made("LOAD_ATTR", attribute)],
    ]


def _call_itself(location: Any) -> list[bc.Instr]:
    """Returns the instructions of a call without arguments, after the function was pushed."""
    call = [bc.Instr("CALL", 0, location=location)]
    return call if bytecode_versions.VERSION >= (3, 12) else [bc.Instr("PRECALL", 0, location=location), *call]


def _call_of(function: bc.Instr, location: Any) -> list[bc.Instr]:
    """Returns the instructions that push a function and call it without arguments."""
    null = bc.Instr("PUSH_NULL", location=location)
    call = _call_itself(location)
    return [function, null, *call] if bytecode_versions.VERSION >= (3, 13) else [null, function, *call]


def _plain_attribute(unit: bc.Instr, nulls: tuple[bool, ...]) -> tuple[list[bc.Instr], tuple[bool, ...]]:
    """Replaces a method lookup by a plain attribute lookup, whose stack effect is known."""
    location = unit.location
    kind: Any = unit.arg
    if unit.name == "LOAD_SUPER_ATTR":
        load = bc.Instr("LOAD_SUPER_ATTR", (False, True, kind[2]), location=location)
        nulls = nulls[:-2]
        if not kind[0]:
            return [load], nulls
    elif isinstance(kind, tuple):  # Python 3.12 and later
        load = bc.Instr("LOAD_ATTR", (False, kind[1]), location=location)
    else:
        load = bc.Instr("LOAD_ATTR", unit.arg, location=location)
    null = bc.Instr("PUSH_NULL", location=location)
    if bytecode_versions.VERSION >= (3, 13):
        return [load, null], (*nulls[:-1], False, True)
    return [load, null, bc.Instr("SWAP", 2, location=location)], (*nulls[:-1], True, False)


def _bound_special_method(unit: bc.Instr) -> list[bc.Instr]:
    """Replaces the lookup of a context's method, which pushes the method and its object or an empty entry, by one whose
    second entry is always empty."""
    location = unit.location
    bind = bc.Instr("LOAD_CONST", _bind, location=location)  # type: ignore[arg-type]
    numbered = (("SWAP", 3), ("CALL", 1))
    call = [bc.Instr(name, number, location=location) for name, number in numbered]
    return [unit.copy(), bind, *call, bc.Instr("PUSH_NULL", location=location)]


def _bind(*found: Any) -> Any:
    """Returns the method from ``(method)`` or ``(object, method)``."""
    return found[0] if len(found) == 1 else types.MethodType(found[1], found[0])


def _stack_after(unit: bc.Instr, nulls: tuple[bool, ...], jump: bool) -> tuple[bool, ...]:
    if unit.name in CALLS:
        popped, pushed = operand_count(unit), 1
    elif unit.name in _PUSH_RESULT:
        popped, pushed = 0, 1
    elif unit.name == "PUSH_NULL":
        return (*nulls, True)
    elif unit.name == "SWAP":
        found = list(nulls)
        assert isinstance(unit.arg, int), "SWAP has a depth"
        found[-1], found[-unit.arg] = found[-unit.arg], found[-1]
        return tuple(found)
    elif unit.name == "LOAD_GLOBAL" and unit.stack_effect() == 2:
        return (*nulls, False, True) if bytecode_versions.NULL_IS_UPPER else (*nulls, True, False)
    elif unit.name in _PUSH_WHAT_THEY_FIND:
        raise Unsupported("SFX111", f"{unit.name} cannot run in a bridge")
    else:
        before, after = unit.pre_and_post_stack_effect(jump)
        popped = max(0, -before)
        pushed = before + after + popped
    if popped > len(nulls) or pushed < 0:
        raise Unsupported("SFX204", f"{unit.name} takes {popped} of {len(nulls)} values")
    return (*nulls[: len(nulls) - popped], *[False] * pushed)


def _pack(landing: Landing, location: Any) -> list[Any]:
    """Returns the state; drops the rest of the stack and the handled exceptions with the frame."""
    layout = landing.layout
    made = [bc.Instr("LOAD_CONST", landing, location=location)]  # type: ignore[arg-type]
    made.append(bc.Instr("LOAD_FAST", STATE, location=location))
    made += [bc.Instr("LOAD_FAST", name, location=location) for name in layout.names]
    above = 2 + len(layout.names)
    depth = len(layout.stack)
    levels = [i for i, slot in enumerate(layout.stack) if slot is Slot.HANDLED]
    for i, slot in enumerate(layout.stack):
        if slot is Slot.NULL:
            continue
        if levels and i == levels[-1]:
            made += _call_of(bc.Instr("LOAD_CONST", sys.exception, location=location), location)  # type: ignore[arg-type]
        else:
            inner = levels[levels.index(i) + 1] if slot is Slot.HANDLED else i
            made.append(bc.Instr("COPY", depth - inner + above, location=location))
        above += 1
    made.append(bc.Instr("BUILD_TUPLE", above - 2, location=location))
    made.append(bc.Instr("BUILD_TUPLE", 3, location=location))
    if levels:
        made.append(bc.Instr("COPY", depth - levels[0] + 1, location=location))
        made.append(bc.Instr("POP_EXCEPT", location=location))
    made.append(bc.Instr("RETURN_VALUE", location=location))
    return made
