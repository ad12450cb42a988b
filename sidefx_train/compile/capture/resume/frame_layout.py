"""Layout of a frame (position, kept variables, stack), and instructions that restore it in a new function."""

from __future__ import annotations

import dis
import enum
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import bytecode as bc

from sidefx_train.compile.capture.interpreter.bytecode_versions import (
    ALWAYS_HAS_KEYWORDS,
    JUMPS_ON_TRUTH,
    SUBSCRIPT_IS_BINARY_OP,
)
from sidefx_train.compile.capture.interpreter.dispatch import code_info
from sidefx_train.compile.capture.resume.exception_stack import stack_levels
from sidefx_train.compile.capture.resume.liveness import super_calls
from sidefx_train.errors import Unsupported

STATE, INNER = ".state", ".inner"
CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX"})
SKIPPED = frozenset({"NOP", "RESUME", "PRECALL", "RESUME_CHECK", "NOT_TAKEN", "KW_NAMES", "CACHE", "EXTENDED_ARG"})
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_STORE_FAST, _STORE_DEREF = dis.opmap["STORE_FAST"], dis.opmap["STORE_DEREF"]


class Slot(enum.Enum):
    """Kind of an entry of the evaluation stack."""

    VALUE = "value"
    NULL = "the empty half of a call's callable slots"
    HANDLED = "what was being handled outside an exception handler; its value is what the handler handles"


@dataclass(frozen=True, eq=False)
class Layout:
    """Position of a frame and the part of its state that is kept.

    Attributes:
        code: the function's own code.
        index: the next instruction (of the decoded program).
        names: variables that are bound and live.
        cells: names of the cells, in the order of the code's slots.
        stack: kind of each stack entry.
    """

    code: types.CodeType
    index: int
    names: tuple[str, ...]
    cells: tuple[str, ...]
    stack: tuple[Slot, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return (id(self.code), self.index, self.names, self.stack)


def _items(code: types.CodeType) -> Iterator[Any]:
    """Yields the assembler's items; what converts a condition to ``bool`` is an instruction of its own."""
    for item in bc.Bytecode.from_code(code):
        if isinstance(item, bc.Instr) and item.name == "COMPARE_OP" and item.arg.name.endswith("_CAST"):  # type: ignore[union-attr]
            yield bc.Instr(item.name, bc.Compare[item.arg.name.removesuffix("_CAST")], location=item.location)  # type: ignore[union-attr]
            yield bc.Instr("TO_BOOL", location=item.location)
        else:
            yield item


def conversions(items: list[Any]) -> set[int]:
    """Returns the ids of the instructions that convert the condition of a jump, which are part of it."""
    instructions = [item for item in items if isinstance(item, bc.Instr) and item.name not in SKIPPED]
    return {
        id(item)
        for item, following in pairwise(instructions)
        if item.name == "TO_BOOL" and following.name in JUMPS_ON_TRUTH
    }


class Body:
    """The original code: its instructions by index of the decoded program, with cells as variables."""

    def __init__(self, code: types.CodeType, suspends: bool = False) -> None:
        if code.co_flags & _SUSPENDS and not (suspends and code.co_flags & inspect.CO_GENERATOR):
            raise Unsupported("SFX111", "cannot continue a generator in the middle")
        if not code.co_flags & inspect.CO_OPTIMIZED:
            raise Unsupported("SFX111", "cannot continue a class body in the middle")
        instructions = code_info(code).instructions
        if any(instr.name == "BUILD_INTERPOLATION" for instr in instructions):  # ``bytecode`` 0.19.1 misreads it
            raise Unsupported("SFX111", "cannot continue a function with a template string in the middle")
        self.code = code
        self.items: list[Any] = []
        self.units: list[bc.Instr] = []
        self.tries: dict[int, bc.TryBegin | None] = {}
        self.groups: dict[int, list[bc.Instr]] = {}
        dropped = 0
        active: bc.TryBegin | None = None
        covering: bc.TryBegin | None = None
        pending: list[bc.Instr] = []
        items = list(_items(code))
        of_jumps = conversions(items)
        for item in items:
            if isinstance(item, bc.TryBegin):
                active = item
            elif isinstance(item, bc.TryEnd):
                active = None
            elif isinstance(item, bc.Instr):
                if isinstance(item.arg, bc.FreeVar):
                    item = bc.Instr(item.name, bc.CellVar(item.arg.name), location=item.location)
                if item.name == "LOAD_SUPER_ATTR":
                    kind: Any = item.arg
                    item.arg = (kind[0], True, kind[2])  # like a call with arguments, which are on the stack
                if item.name in ("KW_NAMES", "PRECALL") or id(item) in of_jumps:
                    pending.append(item)
                    covering = active
                elif item.name not in SKIPPED:
                    self.tries[len(self.units)] = covering if pending else active
                    self.groups[len(self.units)] = [*pending, item]
                    self.units.append(item)
                    pending = []
                    if item.name in ("MAKE_CELL", "COPY_FREE_VARS"):
                        dropped += 1
                        if dropped != len(self.units):
                            raise Unsupported("SFX111", "cannot continue a comprehension with its own cell")
                        continue
            self.items.append(item)
        if len(instructions) != len(self.units):
            raise Unsupported("SFX204", f"{len(self.units)} instructions read as {len(instructions)}")
        for i, covering in self.tries.items():
            handler = instructions[i].handler
            if covering is not None and handler is not None:
                covering.stack_depth = handler[1]  # otherwise the assembler computes it
        self.levels = stack_levels(code_info(code), self.units)
        self.super_calls = super_calls(code_info(code))
        for i in self.super_calls:
            self._name_super(i)

    def stack(self, index: int, nulls: Sequence[bool], entered: bool = False) -> tuple[Slot, ...]:
        """Returns the stack before an instruction, or without its operands; ``nulls`` marks empty entries.

        Raises:
            Unsupported: the saved exception of a handler is being copied or popped.
        """
        known = self.levels[index]
        operands = operand_count(self.units[index]) if entered else 0
        if known is None or known[0] != len(nulls) + operands:
            raise Unsupported("SFX204", f"a stack of {len(nulls)} entries where {known} is expected")
        positions = known[1]
        if len(set(positions.values())) < len(positions):
            raise Unsupported("SFX111", "cannot continue at the end of an exception handler")
        slots = [Slot.NULL if null else Slot.VALUE for null in nulls]
        for position in positions:
            slots[position] = Slot.HANDLED
        return tuple(slots)

    def suspension(self, index: int) -> list[Any]:
        """Returns a copy of a ``yield`` with its exception handler."""
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
        """Adds arguments to ``super()``: the new code's frame does not belong to the method."""
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


def prelude(layout: Layout, location: Any, keep_cells: bool) -> list[Any]:
    """Returns instructions that restore variables and stack; with ``keep_cells`` the cells remain in the state."""
    made: list[Any] = [bc.Instr("RESUME", 0, location=location)]

    def item(*path: int) -> None:
        made.append(bc.Instr("LOAD_FAST", STATE, location=location))
        for position in path:
            made.append(bc.Instr("LOAD_CONST", position, location=location))
            made.append(_item_of(location))

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
        made.append(bc.Instr("LOAD_FAST", STATE, location=location))
        made.append(bc.Instr("LOAD_CONST", position, location=location))
        made.append(bc.Instr("DELETE_SUBSCR", location=location))
    made.append(bc.Instr("STORE_FAST" if keep_cells else "DELETE_FAST", STATE, location=location))
    return made


def _item_of(location: Any) -> bc.Instr:
    if SUBSCRIPT_IS_BINARY_OP:
        return bc.Instr("BINARY_OP", bc.BinaryOp.SUBSCR, location=location)
    return bc.Instr("BINARY_SUBSCR", location=location)


def assemble(layout: Layout, body: Body, items: list[Any], arguments: list[str]) -> types.CodeType:
    """Assembles instructions to a code object with the names, flags and cells of the original."""
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
    free = tuple(name for name in layout.cells if name in code.co_freevars)  # last: an unset one raises NameError
    return result.replace(co_cellvars=layout.cells[: len(layout.cells) - len(free)], co_freevars=free)


def _store_cells(code: types.CodeType, count: int) -> types.CodeType:
    """Replaces the first ``count`` ``STORE_DEREF`` by ``STORE_FAST``: variables and cells share their numbering."""
    raw = bytearray(code.co_code)
    position = 0
    while count:
        if raw[position] == _STORE_DEREF:
            raw[position] = _STORE_FAST
            count -= 1
        position += 2
    return code.replace(co_code=bytes(raw))


def operand_count(call: bc.Instr) -> int:
    """Returns the number of stack entries that a call pops."""
    arg = call.arg
    if call.name == "CALL_FUNCTION_EX" and ALWAYS_HAS_KEYWORDS:
        return 4
    assert isinstance(arg, int), "a call has a number of arguments"
    return {"CALL": arg + 2, "CALL_KW": arg + 3, "CALL_FUNCTION_EX": 3 + (arg & 1)}[call.name]
