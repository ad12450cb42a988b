"""Code objects that enter a function in the middle.

Both kinds hold the whole original code, so that its exception handlers, loops and line numbers are its own, behind a
prelude that restores variables and stack. The one argument is the list ``[cells, values]``, which the prelude empties:
a value that the function drops is dropped by all.

- A *continuation* jumps to the instruction and runs on. It is what gets captured next.
- A *bridge* runs one instruction natively, under the handlers that cover it, and returns a :class:`Landing` with the
  state behind it. If the instruction raises, the function's own handlers run natively, to the end of the function. Of
  an outer frame the instruction is a call that has been entered: the bridge drives what is inside instead, which its
  second argument hands out.

Cells of the original, its own and its closure's, are variables of the new code that hold cells: the prelude puts them
there.
"""

from __future__ import annotations

import dis
import enum
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import bytecode as bc

from sidefx_train.compile.capture import versions
from sidefx_train.compile.capture.program import program_of
from sidefx_train.compile.continuations.handling import stack_levels
from sidefx_train.compile.continuations.liveness import super_calls
from sidefx_train.errors import Unsupported

_STATE, _INNER = ".state", ".inner"
_SKIPPED = frozenset({"NOP", "RESUME", "PRECALL", "RESUME_CHECK", "NOT_TAKEN", "KW_NAMES", "CACHE", "EXTENDED_ARG"})
_ENDS = frozenset({"RAISE_VARARGS", "RERAISE", "RETURN_VALUE", "RETURN_CONST"})
_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX"})
_PUSH_WHAT_THEY_FIND = frozenset({"LOAD_FAST_AND_CLEAR", "SEND"})
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_STORE_FAST, _STORE_DEREF = dis.opmap["STORE_FAST"], dis.opmap["STORE_DEREF"]


class Slot(enum.Enum):
    """What an entry of the evaluation stack is."""

    VALUE = "value"
    NULL = "the empty half of a call's callable slots"
    HANDLED = "what was being handled outside an exception handler; its value is what the handler handles"


@dataclass(frozen=True, eq=False)
class Layout:
    """Where a frame stands and what of it is kept.

    Attributes:
        code: the function's own code.
        index: the next instruction (of the decoded program).
        names: variables that are bound and still needed.
        cells: names of the cells, in the order of the code's slots.
        stack: what each entry of the stack is.
    """

    code: types.CodeType
    index: int
    names: tuple[str, ...]
    cells: tuple[str, ...]
    stack: tuple[Slot, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return (id(self.code), self.index, self.names, self.stack)


_origins: dict[int, tuple[Layout, dict[int, int], Any]] = {}


@dataclass(frozen=True, eq=False)
class Landing:
    """First item of what a bridge returns where its instruction is done: ``(landing, cells, values)``."""

    layout: Layout


def original(code: types.CodeType, index: int) -> tuple[types.CodeType, int]:
    """The function's own code and instruction, for one of a continuation."""
    found = _origins.get(id(code))
    if found is None:
        return code, index
    layout, table, _ = found
    if index not in table:
        raise Unsupported("SFX111", "a continuation cannot be entered where it restores a frame")
    return layout.code, table[index]


def is_continuation(fn: Any) -> bool:
    """True for a function that enters another in the middle."""
    return isinstance(fn, types.FunctionType) and id(fn.__code__) in _origins


def given_names(fn: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a continuation's ``[cells, values]`` are called: variables by name, what is on the stack by place."""
    layout = _origins[id(fn.__code__)][0]
    held = sum(slot is not Slot.NULL for slot in layout.stack)
    return layout.cells, (*layout.names, *(f"stack[{i}]" for i in range(held)))


class _Body:
    """The original code, its instructions by index of the decoded program, its cells as variables."""

    def __init__(self, code: types.CodeType, suspends: bool = False) -> None:
        if code.co_flags & _SUSPENDS and not (suspends and code.co_flags & inspect.CO_GENERATOR):
            raise Unsupported("SFX111", "a generator cannot be entered in the middle")
        if not code.co_flags & inspect.CO_OPTIMIZED:
            raise Unsupported("SFX111", "a class body cannot be entered in the middle")
        self.code = code
        self.items: list[Any] = []
        self.units: list[bc.Instr] = []
        self.tries: dict[int, bc.TryBegin | None] = {}
        self.groups: dict[int, list[bc.Instr]] = {}
        dropped = 0
        active: bc.TryBegin | None = None
        pending: list[bc.Instr] = []
        for item in bc.Bytecode.from_code(code):
            if isinstance(item, bc.TryBegin):
                active = item
            elif isinstance(item, bc.TryEnd):
                active = None
            elif isinstance(item, bc.Instr):
                if isinstance(item.arg, bc.FreeVar):
                    item = bc.Instr(item.name, bc.CellVar(item.arg.name), location=item.location)
                if item.name == "LOAD_SUPER_ATTR":
                    kind: Any = item.arg
                    item.arg = (kind[0], True, kind[2])  # as if written with arguments, which are on the stack
                if item.name in ("KW_NAMES", "PRECALL"):
                    pending.append(item)
                elif item.name not in _SKIPPED:
                    self.tries[len(self.units)] = active
                    self.groups[len(self.units)] = [*pending, item]
                    self.units.append(item)
                    pending = []
                    if item.name in ("MAKE_CELL", "COPY_FREE_VARS"):
                        dropped += 1
                        if dropped != len(self.units):
                            raise Unsupported("SFX111", "a comprehension's own cell cannot be entered in the middle")
                        continue
            self.items.append(item)
        instructions = program_of(code).instructions
        if len(instructions) != len(self.units):
            raise Unsupported("SFX204", f"{len(self.units)} instructions read as {len(instructions)}")
        for i, covering in self.tries.items():
            handler = instructions[i].handler
            if covering is not None and handler is not None:
                covering.stack_depth = handler[1]  # the library leaves it to be computed
        self.levels = stack_levels(program_of(code), self.units)
        self.super_calls = super_calls(program_of(code))
        for i in self.super_calls:
            self._name_super(i)

    def stack(self, index: int, nulls: Sequence[bool], entered: bool = False) -> tuple[Slot, ...]:
        """The stack in front of an instruction, or without its operands, by what is known of its empty entries.

        Raises:
            Unsupported: a copy is about to be made or ended of what a handler keeps.
        """
        known = self.levels[index]
        operands = _operands(self.units[index]) if entered else 0
        if known is None or known[0] != len(nulls) + operands:
            raise Unsupported("SFX204", f"a stack of {len(nulls)} entries where {known} is expected")
        positions = known[1]
        if len(set(positions.values())) < len(positions):
            raise Unsupported("SFX111", "an exception handler that is being left cannot be entered")
        slots = [Slot.NULL if null else Slot.VALUE for null in nulls]
        for position in positions:
            slots[position] = Slot.HANDLED
        return tuple(slots)

    def suspension(self, index: int) -> list[Any]:
        """A copy of a ``yield``, under the handler that covers it."""
        unit, covering = self.units[index], self.tries[index]
        at = next(i for i, item in enumerate(self.items) if item is unit)
        made = [item.copy() for item in self.items[at : at + 2]]
        if [item.name for item in made] != ["YIELD_VALUE", "RESUME"]:
            raise Unsupported("SFX204", f"a generator suspended at {unit.name}")
        if covering is None:
            return made
        opened = bc.TryBegin(covering.target, covering.push_lasti, covering.stack_depth)
        return [opened, *made, bc.TryEnd(opened)]

    def _name_super(self, index: int) -> None:
        """Gives ``super()`` its arguments: the new code's frame is not one of the method."""
        group = self.groups[index]
        location = group[0].location
        first = self.code.co_varnames[0]
        cell = first in self.code.co_cellvars
        added = [
            bc.Instr("LOAD_DEREF", bc.CellVar("__class__"), location=location),
            bc.Instr(*(("LOAD_DEREF", bc.CellVar(first)) if cell else ("LOAD_FAST", first)), location=location),
        ]
        at = next(i for i, item in enumerate(self.items) if item is group[0])
        self.items[at:at] = added
        for item in group:
            item.arg = 2
        self.groups[index] = [*added, *group]


def _prelude(layout: Layout, location: Any, keep_cells: bool) -> list[Any]:
    made: list[Any] = [bc.Instr("RESUME", 0, location=location)]

    def item(*path: int) -> None:
        made.append(bc.Instr("LOAD_FAST", _STATE, location=location))
        for position in path:
            made.append(bc.Instr("LOAD_CONST", position, location=location))
            made.append(bc.Instr("BINARY_SUBSCR", location=location))

    for i, name in enumerate(layout.cells):
        item(0, i)
        made.append(bc.Instr("STORE_DEREF", bc.CellVar(name), location=location))  # becomes STORE_FAST
    for i, name in enumerate(layout.names):
        item(1, i)
        made.append(bc.Instr("STORE_FAST", name, location=location))
    position = len(layout.names)
    for slot in layout.stack:
        if slot is Slot.NULL:
            made.append(bc.Instr("PUSH_NULL", location=location))
            continue
        item(1, position)
        position += 1
        if slot is Slot.HANDLED:
            made += [bc.Instr("PUSH_EXC_INFO", location=location), bc.Instr("POP_TOP", location=location)]
    if keep_cells:
        item(0)
    for position in (1, 0):
        made.append(bc.Instr("LOAD_FAST", _STATE, location=location))
        made.append(bc.Instr("LOAD_CONST", position, location=location))
        made.append(bc.Instr("DELETE_SUBSCR", location=location))
    made.append(bc.Instr("STORE_FAST" if keep_cells else "DELETE_FAST", _STATE, location=location))
    return made


def _assemble(layout: Layout, body: _Body, items: list[Any], arguments: list[str]) -> types.CodeType:
    code = layout.code
    made = bc.Bytecode(items)
    made.argcount = len(arguments)
    made.argnames = list(arguments)
    made.name, made.qualname, made.filename = code.co_name, code.co_qualname, code.co_filename
    made.first_lineno = code.co_firstlineno
    made.flags = bc.CompilerFlags(code.co_flags & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))
    made.cellvars = list(layout.cells)
    made.freevars = []
    size = code.co_stacksize + len(layout.names) + len(layout.stack) + 8
    result = made.to_code(stacksize=size, compute_exception_stack_depths=False)
    result = _store_cells(result, len(layout.cells))
    free = tuple(name for name in layout.cells if name in code.co_freevars)  # the last: an unset one raises NameError
    return result.replace(co_cellvars=layout.cells[: len(layout.cells) - len(free)], co_freevars=free)


def function(code: types.CodeType, space: dict[str, Any]) -> types.FunctionType:
    """A function of a code made here, which is called with its cells: the closure is only there to fit."""
    return types.FunctionType(code, space, code.co_name, None, tuple(types.CellType() for _ in code.co_freevars))


def _store_cells(code: types.CodeType, count: int) -> types.CodeType:
    """Turns the first ``count`` ``STORE_DEREF`` into ``STORE_FAST``: variables and cells share their numbering."""
    raw = bytearray(code.co_code)
    position = 0
    while count:
        if raw[position] == _STORE_DEREF:
            raw[position] = _STORE_FAST
            count -= 1
        position += 2
    return code.replace(co_code=bytes(raw))


def _remember(made: types.CodeType, layout: Layout, items: list[Any], body: _Body) -> None:
    """Keeps where each instruction of ``made`` comes from, for a break in a continuation."""
    index_of = {id(unit): i for i, unit in enumerate(body.units)}
    table: dict[int, int] = {}
    count = 0
    for item in items:
        if isinstance(item, bc.Instr) and item.name not in _SKIPPED:
            if id(item) in index_of:
                table[count] = index_of[id(item)]
            count += 1
    _origins[id(made)] = (layout, table, made)


def continuation(layout: Layout) -> types.CodeType:
    """The function from ``layout.index`` on; takes ``[cells, values]``.

    Raises:
        Unsupported: the function cannot be entered there.
    """
    body = _Body(layout.code)
    unit = body.units[layout.index]
    here = bc.Label()
    items: list[Any] = [*_prelude(layout, unit.location, keep_cells=False), bc.Instr("JUMP_FORWARD", here)]
    for item in body.items:
        if item is body.groups[layout.index][0]:
            items.append(here)
        items.append(item)
    made = _assemble(layout, body, items, [_STATE])
    _remember(made, layout, items, body)
    return made


def generator(layout: Layout, started: bool, delegates: bool) -> types.CodeType:
    """A generator function that takes ``[cells, values]`` and goes on at ``layout.index``.

    Args:
        layout: the frame of a suspended generator; the last value of its stack is the one to be sent.
        started: it is suspended at a ``yield``: the new generator suspends there too when it is first resumed.
        delegates: that is a ``yield from``, which is entered itself: CPython reads the code around it.

    Raises:
        Unsupported: the generator cannot be entered there.
    """
    body = _Body(layout.code, suspends=True)
    layout = replace(layout, stack=layout.stack[:-1])
    location = body.units[layout.index - 1].location
    here = bc.Label()
    items: list[Any] = [bc.Instr("RETURN_GENERATOR", location=location), bc.Instr("POP_TOP", location=location)]
    items += _prelude(layout, location, keep_cells=False)
    items.append(bc.Instr("LOAD_CONST", None, location=location))  # type: ignore[arg-type]
    if started and not delegates:
        items += body.suspension(layout.index - 1)
    items.append(bc.Instr("JUMP_FORWARD", here, location=location))
    entry = body.groups[layout.index - 1 if delegates else layout.index][0]
    for item in body.items:
        if item is entry:
            items.append(here)
        items.append(item)
    return _assemble(layout, body, items, [_STATE])


@dataclass(frozen=True)
class Bridge:
    """One instruction of a frame as a function of the frame's state.

    Attributes:
        code: takes the state, and for a frame that has entered a call the crossing of the frames inside.
        landings: the states it may lead to.
    """

    code: types.CodeType
    landings: tuple[Landing, ...]


def layout_at(
    code: types.CodeType,
    index: int,
    names: tuple[str, ...],
    cells: tuple[str, ...],
    nulls: tuple[bool, ...],
    entered: bool,
) -> Layout:
    """The layout of a frame that stands in front of an instruction, or has entered the call that it is.

    Args:
        code: the function's own code.
        index: the instruction.
        names: variables that are bound and still needed.
        cells: names of the cells.
        nulls: for each entry of the stack, true if it is empty.
        entered: the operands are gone.

    Raises:
        Unsupported: the function cannot be entered there.
    """
    body = _Body(code, suspends=True)
    if entered and body.units[index].name not in _CALLS:
        raise Unsupported("SFX111", f"a call made by {body.units[index].name} cannot be entered in the middle")
    return Layout(code, index, names, cells, body.stack(index, nulls, entered))


def bridge(layout: Layout, entered: bool, bound_after: Callable[[int], tuple[str, ...]]) -> Bridge:
    """The instruction at ``layout.index``, natively.

    Args:
        layout: the frame in front of the instruction; behind its operands if ``entered``.
        entered: the instruction is a call whose callee is suspended as well.
        bound_after: variables that are bound and needed in front of the instruction with the given index.

    Raises:
        Unsupported: the instruction cannot be run so.
    """
    body = _Body(layout.code)
    index = layout.index
    unit = body.units[index]
    location = unit.location
    program = program_of(layout.code)
    instr = program.instructions[index]
    items: list[Any] = _prelude(layout, location, keep_cells=True)
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
    else:
        given = (False, False) if index in body.super_calls else ()
        after = _stack_after(unit, (*nulls, *given), jump=False)
    covering = body.tries[index]
    if covering is not None:
        opened = bc.TryBegin(covering.target, covering.push_lasti, covering.stack_depth)
        # An error out of a callee is looked up one unit in front of the call, where a compiler has its operands.
        items += [opened, bc.Instr("NOP", location=location)]
    last = group[-1]
    if not entered and isinstance(last.arg, bc.Label):
        there = bc.Label()
        if unit.name == "FOR_ITER":
            nulls_there = nulls[:-1]
            skip = [bc.Instr(n, location=location) for n in ("END_FOR", "POP_TOP")[: versions.FOR_ITER_SKIP]]
        else:
            nulls_there, skip = _stack_after(unit, nulls, jump=True), []
        tail = [there, *skip, *landing(instr.target, nulls_there)]
        group[-1] = bc.Instr(last.name.replace("BACKWARD", "FORWARD"), there, location=location)
    items += group
    if covering is not None:
        items.append(bc.TryEnd(opened))
    if unit.name not in _ENDS and instr.name != "JUMP":
        items += landing(index + 1, after)
    items += tail
    items += body.items
    made = _assemble(layout, body, items, [_STATE, _INNER])
    return Bridge(made, tuple(landings))


def _drive_inner(location: Any) -> list[Any]:
    """Runs the frames inside to their end, bridge by bridge, and pushes what they return."""

    def made(name: str, *arg: Any) -> bc.Instr:
        return bc.Instr(name, *arg, location=location)

    again, done = bc.Label(), bc.Label()
    jump = "POP_JUMP_IF_NONE" if versions.VERSION >= (3, 12) else "POP_JUMP_FORWARD_IF_NONE"
    attribute = (False, "out") if versions.VERSION >= (3, 12) else "out"
    swap = [] if versions.VERSION >= (3, 13) else [made("SWAP", 2)]
    return [
        *[again, *_call_of(made("LOAD_FAST", _INNER), location), made("COPY", 1), made(jump, done)],
        *[made("PUSH_NULL"), *swap, *_call_itself(location)],
        *[made("LOAD_FAST", _INNER), made("STORE_ATTR", "out"), made("JUMP_BACKWARD", again)],
        *[done, made("POP_TOP"), made("LOAD_FAST", _INNER), made("LOAD_ATTR", attribute)],
    ]


def _call_itself(location: Any) -> list[bc.Instr]:
    """The instructions of a call without arguments, behind what pushes the function."""
    call = [bc.Instr("CALL", 0, location=location)]
    return call if versions.VERSION >= (3, 12) else [bc.Instr("PRECALL", 0, location=location), *call]


def _call_of(function: bc.Instr, location: Any) -> list[bc.Instr]:
    """A call without arguments."""
    null = bc.Instr("PUSH_NULL", location=location)
    call = _call_itself(location)
    return [function, null, *call] if versions.VERSION >= (3, 13) else [null, function, *call]


def _plain_attribute(unit: bc.Instr, nulls: tuple[bool, ...]) -> tuple[list[bc.Instr], tuple[bool, ...]]:
    """A method lookup as a plain attribute lookup: what it pushes is known then."""
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
    if versions.VERSION >= (3, 13):
        return [load, null], (*nulls[:-1], False, True)
    return [load, null, bc.Instr("SWAP", 2, location=location)], (*nulls[:-1], True, False)


def _operands(call: bc.Instr) -> int:
    """How many entries of the stack a call takes."""
    arg = call.arg
    assert isinstance(arg, int), "a call has a number of arguments"
    return {"CALL": arg + 2, "CALL_KW": arg + 3, "CALL_FUNCTION_EX": 3 + (arg & 1)}[call.name]


def _stack_after(unit: bc.Instr, nulls: tuple[bool, ...], jump: bool) -> tuple[bool, ...]:
    if unit.name in _CALLS:
        popped, pushed = _operands(unit), 1
    elif unit.name == "FOR_ITER":
        popped, pushed = 0, 1
    elif unit.name == "PUSH_NULL":
        return (*nulls, True)
    elif unit.name == "SWAP":
        found = list(nulls)
        assert isinstance(unit.arg, int), "SWAP has a depth"
        found[-1], found[-unit.arg] = found[-unit.arg], found[-1]
        return tuple(found)
    elif unit.name == "LOAD_GLOBAL" and unit.stack_effect() == 2:
        return (*nulls, False, True) if versions.NULL_IS_UPPER else (*nulls, True, False)
    elif unit.name in _PUSH_WHAT_THEY_FIND:
        raise Unsupported("SFX111", f"{unit.name} cannot be run in the middle")
    else:
        before, after = unit.pre_and_post_stack_effect(jump)
        popped = max(0, -before)
        pushed = before + after + popped
    if popped > len(nulls) or pushed < 0:
        raise Unsupported("SFX204", f"{unit.name} takes {popped} of {len(nulls)} values")
    return (*nulls[: len(nulls) - popped], *[False] * pushed)


def _pack(landing: Landing, location: Any) -> list[Any]:
    """Returns the state; what is left on the stack goes with the frame, what it handles is no longer handled."""
    layout = landing.layout
    made = [bc.Instr("LOAD_CONST", landing, location=location)]  # type: ignore[arg-type]
    made.append(bc.Instr("LOAD_FAST", _STATE, location=location))
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
