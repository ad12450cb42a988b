"""Code objects that enter a function in the middle.

Both kinds contain the complete original code, which keeps its exception handlers, loops and line numbers, after a
prelude that restores variables and stack. The single argument is the list ``[cells, values]``; the prelude empties it,
so that no other reference remains to a value that the function drops.

- A *continuation* (resume function) jumps to the instruction and continues. It is captured next.
- A *bridge* runs one instruction natively, with its exception handlers, and returns a :class:`Landing` with the state
  after it. If the instruction raises, the function's own handlers run natively, to the end of the function. In an outer
  frame the instruction is a call that has been entered: the bridge drives the inner frames instead, which its second
  argument provides.

Cells of the original code and of its closure become variables of the new code that hold cells; the prelude sets them.
"""

from __future__ import annotations

import itertools
import types
import weakref
from dataclasses import replace
from typing import Any

import bytecode as bc

from sidefx_train.compile.capture.interpreter.dispatch import code_info
from sidefx_train.compile.capture.resume.frame_layout import (
    CALLS,
    SKIPPED,
    STATE,
    Body,
    Layout,
    Slot,
    assemble,
    conversions,
    prelude,
)
from sidefx_train.errors import Unsupported

_origins: dict[int, tuple[Layout, dict[int, int], weakref.ref[types.CodeType]]] = {}
"""By the id of a continuation's code: its entry goes with the code."""


def original(code: types.CodeType, index: int) -> tuple[types.CodeType, int]:
    """Returns the original code and instruction index of an instruction in a continuation."""
    found = _origins.get(id(code))
    if found is None:
        return code, index
    layout, table, _ = found
    if index not in table:
        raise Unsupported("SFX111", "cannot continue where a resume function restores a frame")
    return layout.code, table[index]


def is_continuation(fn: Any) -> bool:
    """Returns True for a function that enters another in the middle."""
    return isinstance(fn, types.FunctionType) and id(fn.__code__) in _origins


def given_names(fn: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns names for a continuation's ``[cells, values]``: variables by name, stack entries by position."""
    layout = _origins[id(fn.__code__)][0]
    held = sum(slot is not Slot.NULL for slot in layout.stack)
    return layout.cells, (*layout.names, *(f"stack[{i}]" for i in range(held)))


def loop_variables(fn: Any) -> frozenset[str]:
    """Returns the variables that the ``for`` statements around a continuation's entry set in each round."""
    layout = _origins[id(fn.__code__)][0]
    info = code_info(layout.code)
    found: set[str] = set()
    for start, instr in enumerate(info.instructions):
        if instr.name == "FOR_ITER" and start < layout.index < instr.target:
            targets = itertools.islice(info.instructions, start + 1, None)
            first = next(targets)
            count = 1 if first.name.startswith("STORE_") else first.arg if first.name == "UNPACK_SEQUENCE" else 0
            stores = [first] if count == 1 and first.name.startswith("STORE_") else itertools.islice(targets, count)
            found |= {info.slots[each.arg] for each in stores if each.name in _STORES}
    return frozenset(found)


_STORES = frozenset({"STORE_FAST", "STORE_DEREF"})


def function(code: types.CodeType, space: dict[str, Any]) -> types.FunctionType:
    """Creates a function from generated code, called with its cells; its closure only has the required length."""
    return types.FunctionType(code, space, code.co_name, None, tuple(types.CellType() for _ in code.co_freevars))


def _remember(made: types.CodeType, layout: Layout, items: list[Any], body: Body) -> None:
    """Records the origin of each instruction of ``made``, for a break in a continuation."""
    index_of = {id(unit): i for i, unit in enumerate(body.units)}
    table: dict[int, int] = {}
    count = 0
    of_jumps = conversions(items)
    for item in items:
        if isinstance(item, bc.Instr) and item.name not in SKIPPED and id(item) not in of_jumps:
            if id(item) in index_of:
                table[count] = index_of[id(item)]
            count += 1
    key = id(made)
    _origins[key] = (layout, table, weakref.ref(made, lambda _: _origins.pop(key)))


def continuation(layout: Layout) -> types.CodeType:
    """Returns the code of the function from ``layout.index`` on; it takes ``[cells, values]``.

    Raises:
        Unsupported: the function cannot be entered there.
    """
    body = Body(layout.code)
    unit = body.units[layout.index]
    here = bc.Label()
    items: list[Any] = [*prelude(layout, unit.location, keep_cells=False), bc.Instr("JUMP_FORWARD", here)]
    for item in body.items:
        if item is body.groups[layout.index][0]:
            items.append(here)
        items.append(item)
    made = assemble(layout, body, items, [STATE])
    _remember(made, layout, items, body)
    return made


def generator(layout: Layout, started: bool, delegates: bool) -> types.CodeType:
    """Returns the code of a generator function that takes ``[cells, values]`` and continues at ``layout.index``.

    Args:
        layout: the frame of a suspended generator; the top of its stack is the value to be sent.
        started: suspended at a ``yield``: the new generator suspends there too when it is first resumed.
        delegates: suspended at a ``yield from``, which is entered itself: CPython reads the code around it.

    Raises:
        Unsupported: the generator cannot be entered there.
    """
    body = Body(layout.code, suspends=True)
    layout = replace(layout, stack=layout.stack[:-1])
    location = body.units[layout.index - 1].location
    here = bc.Label()
    items: list[Any] = [bc.Instr("RETURN_GENERATOR", location=location), bc.Instr("POP_TOP", location=location)]
    items += prelude(layout, location, keep_cells=False)
    items.append(bc.Instr("LOAD_CONST", None, location=location))  # type: ignore[arg-type]
    if started and not delegates:
        items += body.suspension(layout.index - 1)
    items.append(bc.Instr("JUMP_FORWARD", here, location=location))
    entry = body.groups[layout.index - 1 if delegates else layout.index][0]
    for item in body.items:
        if item is entry:
            items.append(here)
        items.append(item)
    return assemble(layout, body, items, [STATE])


def layout_at(
    code: types.CodeType,
    index: int,
    names: tuple[str, ...],
    cells: tuple[str, ...],
    nulls: tuple[bool, ...],
    entered: bool,
) -> Layout:
    """Returns the layout of a frame before an instruction, or inside the call that the instruction is.

    Args:
        code: the function's own code.
        index: index of the instruction.
        names: variables that are bound and live.
        cells: names of the cells.
        nulls: for each stack entry, True if it is empty.
        entered: the operands are popped.

    Raises:
        Unsupported: the function cannot be entered there.
    """
    body = Body(code, suspends=True)
    if entered and body.units[index].name not in CALLS:
        raise Unsupported("SFX111", f"cannot continue within a call made by {body.units[index].name}")
    return Layout(code, index, names, cells, body.stack(index, nulls, entered))
