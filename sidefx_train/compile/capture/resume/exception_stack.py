"""Finds the stack entries that save the previously handled exception in an exception handler.

The program cannot read such an entry: ``PUSH_EXC_INFO`` saves the interpreter's *previous* exception there and
``POP_EXCEPT`` restores it. A frame that is entered inside a handler recreates the entry by handling the exception
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
from sidefx_train.compile.capture.interpreter.code import CodeInfo

_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP"})

_CALLS = {"CALL": 1, "CALL_KW": 2}
"""Popped entries other than the arguments, minus the result."""

Levels = dict[int, int]
"""Stack position -> index of the ``PUSH_EXC_INFO`` that pushed the entry."""


def stack_levels(info: CodeInfo, units: Sequence[Any]) -> tuple[tuple[int, Levels] | None, ...]:
    """Returns the stack depth and those entries before each instruction; ``None`` for unreachable ones.

    Args:
        info: the decoded code.
        units: the same instructions in the assembler's form.
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
        if instr.target >= 0 and instr.name != "YIELD_VALUE":  # its target is the end of its ``yield from``
            # The end of a loop lies after the instructions that drop the iterator.
            jumped = -1 if instr.name == "FOR_ITER" else unit.stack_effect(jump=True)
            waiting.append((instr.target, depth + jumped, open_levels))
        if instr.name not in _ENDS and index + 1 < len(instructions):
            after = _after(instr.name, instr.arg, index, depth, open_levels)
            waiting.append((index + 1, depth + _effect(instr, unit), after))
    return tuple(found)


def _effect(instr: Instruction, unit: Any) -> int:
    if instr.name in _CALLS:
        return -_CALLS[instr.name] - instr.arg
    if instr.name == "RETURN_GENERATOR":  # the first ``send`` pushes a value
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
