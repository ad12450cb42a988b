"""Which stack entries of a code object keep what was being handled before an exception handler was entered.

Such an entry is not the program's to read: ``PUSH_EXC_INFO`` puts the interpreter's *previous* exception there and
``POP_EXCEPT`` makes it current again. A frame that is entered in the middle of a handler makes the entry anew, by
handling the exception again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
from sidefx_train.compile.capture.interpreter.code import CodeInfo

_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP"})

_CALLS = {"CALL": 1, "CALL_KW": 2}
"""What they take besides their arguments, less the result."""

Levels = dict[int, int]
"""Position on the stack: the ``PUSH_EXC_INFO`` that made the entry."""


def stack_levels(info: CodeInfo, units: Sequence[Any]) -> tuple[tuple[int, Levels] | None, ...]:
    """The stack's depth and those entries in front of each instruction; ``None`` where it is never reached.

    Args:
        info: the decoded code.
        units: the same instructions as the assembler knows them.
    """
    instructions = info.instructions
    found: list[tuple[int, Levels] | None] = [None] * len(instructions)
    waiting: list[tuple[int, int, Levels]] = [(0, 0, {})]
    while waiting:
        index, depth, open_levels = waiting.pop()
        if found[index] is not None:
            continue
        found[index] = depth, open_levels
        instr, unit = instructions[index], units[index]
        if instr.handler is not None:
            target, height, lasti = instr.handler
            kept = {position: level for position, level in open_levels.items() if position < height}
            waiting.append((target, height + lasti + 1, kept))
        if instr.target >= 0 and instr.name != "YIELD_VALUE":  # which only knows the end of its ``yield from``
            # The end of a loop is behind the instructions that drop the iterator.
            jumped = -1 if instr.name == "FOR_ITER" else unit.stack_effect(jump=True)
            waiting.append((instr.target, depth + jumped, open_levels))
        if instr.name not in _ENDS and index + 1 < len(instructions):
            after = _after(instr.name, instr.arg, index, depth, open_levels)
            waiting.append((index + 1, depth + _effect(instr, unit), after))
    return tuple(found)


def _effect(instr: Instruction, unit: Any) -> int:
    if instr.name in _CALLS:
        return -_CALLS[instr.name] - instr.arg
    if instr.name == "RETURN_GENERATOR":  # the first ``send`` gives a value
        return 1
    effect: int = unit.stack_effect(jump=False)
    return effect


def _after(name: str, arg: int, index: int, depth: int, before: Levels) -> Levels:
    if name == "PUSH_EXC_INFO":
        return {**before, depth - 1: index}
    if name == "POP_EXCEPT":
        ended = before.get(depth - 1)
        return {position: level for position, level in before.items() if level != ended}
    after = dict(before)
    if name == "SWAP":
        one, other = depth - 1, depth - arg
        for position in (one, other):
            after.pop(position, None)
        for start, end in ((one, other), (other, one)):
            if start in before:
                after[end] = before[start]
    elif name == "COPY" and depth - arg in before:
        after[depth] = before[depth - arg]
    return after
