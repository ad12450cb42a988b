"""``with`` statements of a code object: where one begins, and how it ends without an exception.

A break inside a context that cannot be kept between two parts (a profiler that runs, hooks on saved tensors, an object
of C code) suspends the step before the whole statement, which then runs natively.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Set
from dataclasses import dataclass

from sidefx_train.compile.capture.interpreter.bytecode_versions import ENTRIES_OF_EXIT, Instruction, entered_contexts
from sidefx_train.compile.capture.interpreter.dispatch import code_info
from sidefx_train.compile.capture.resume.frame_layout import Body
from sidefx_train.compile.capture.resume.liveness import own_effect
from sidefx_train.errors import Unsupported

_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP"})


@dataclass(frozen=True)
class WithBlock:
    """A ``with`` statement with one context.

    Attributes:
        start: index of the first instruction of the expression that creates the context.
        entry: index of the instruction that enters it.
        body: indices of the instructions from there until it has been left, except its own exception handler.
        exits: indices of the last instructions when it has been left without an exception.
    """

    start: int
    entry: int
    body: frozenset[int]
    exits: frozenset[int]


def enclosing(code: types.CodeType, index: int) -> list[WithBlock]:
    """Returns the ``with`` statements that have been entered before an instruction of them, innermost first."""
    if not code_info(code).has_with:
        return []
    return sorted((block for block in _blocks(code) if index in block.body), key=lambda block: len(block.body))


def block_at(code: types.CodeType, start: int) -> WithBlock:
    """Returns the ``with`` statement that begins at an instruction."""
    return next(block for block in _blocks(code) if block.start == start)


def bound_at_exits(
    code: types.CodeType, block: WithBlock, bound: Set[int]
) -> tuple[dict[int, frozenset[int]], Set[int]]:
    """Returns which variables are bound when a block has been left.

    Args:
        code: the code.
        block: the block.
        bound: slots of the variables that are bound before it.

    Returns:
        For each instruction after an exit the slots that are bound on every way there; and those that are bound on some
        way.
    """
    instructions = code_info(code).instructions
    within = {*range(block.start, block.entry), *block.body}
    within |= {block.entry, *(index + 1 for index in block.exits)}
    before = bound_before(instructions, block.start, within, bound)
    some = frozenset(bound).union(*(own_effect(instructions[index])[0] for index in within))
    return {index + 1: before[index + 1] for index in block.exits}, some


def bound_before(
    instructions: list[Instruction], start: int, within: Set[int], bound: Set[int]
) -> dict[int, frozenset[int]]:
    """Returns the slots that are bound before each of some instructions on every way there.

    Args:
        instructions: the decoded code.
        start: the instruction with which it begins.
        within: indices of the instructions.
        bound: slots of the variables that are bound before that one.
    """
    # A comprehension takes its variable away and gives it back, bound or not.
    taken = {instructions[i].arg for i in within if instructions[i].name == "LOAD_FAST_AND_CLEAR"}

    def effect(index: int) -> tuple[frozenset[int], frozenset[int]]:
        stored, unbound = own_effect(instructions[index])
        return stored - taken, unbound if instructions[index].name == "DELETE_FAST" else unbound - taken

    before: dict[int, frozenset[int]] = {start: frozenset(bound)}
    waiting = [start]
    while waiting:
        index = waiting.pop()
        stored, unbound = effect(index)
        for after, raised in following(instructions, index):
            if after in within:
                found = (before[index] if raised else before[index] | stored) - unbound
                known = before.get(after)
                if known is None or not known <= found:
                    before[after] = found if known is None else known & found
                    waiting.append(after)
    return before


def _blocks(code: types.CodeType) -> Iterator[WithBlock]:
    try:
        levels = Body(code, suspends=True).levels
    except Unsupported:
        return
    instructions = code_info(code).instructions
    depths = [-1 if level is None else level[0] for level in levels]
    for entry, taken in entered_contexts(instructions):
        if depths[entry] >= taken:
            block = _block(instructions, depths, entry, depths[entry] - taken)
            if block is not None:
                yield block


def _block(instructions: list[Instruction], depths: list[int], entry: int, depth: int) -> WithBlock | None:
    """Returns the statement whose context is entered at an instruction, with the stack depth around it; ``None`` if it
    is left in an unknown way."""
    start = next((i for i in range(entry - 1, -1, -1) if depths[i] <= depth), None)
    if start is None or depths[start] != depth:
        return None
    inner = depth + ENTRIES_OF_EXIT
    body: set[int] = set()
    exits: set[int] = set()
    waiting = [entry + 1]
    while waiting:
        index = waiting.pop()
        if index in body:
            continue
        body.add(index)
        for after, raised in following(instructions, index):
            handler = instructions[index].handler
            if (
                raised
                and handler is not None
                and (handler[1] <= depth or _is_exit(instructions, after, inner, handler))
            ):
                continue
            if depths[after] > depth:
                waiting.append(after)
            elif after == index + 1 and instructions[index].name == "POP_TOP" and not raised:
                exits.add(index)
            else:
                return None
    return WithBlock(start, entry, frozenset(body), frozenset(exits)) if exits else None


def _is_exit(instructions: list[Instruction], handler: int, depth: int, described: tuple[int, int, bool]) -> bool:
    """Returns True for the handler that calls ``__exit__`` with the exception."""
    following = instructions[handler : handler + 2]
    return described[1] == depth and [each.name for each in following] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]


def following(instructions: list[Instruction], index: int) -> Iterator[tuple[int, bool]]:
    """Yields the instructions that may follow another, with True for a handler of its exceptions."""
    instr = instructions[index]
    if instr.name not in _ENDS and index + 1 < len(instructions):
        yield index + 1, False
    if instr.target >= 0 and instr.name != "YIELD_VALUE":
        yield instr.target, False
    if instr.handler is not None:
        yield instr.handler[0], True
