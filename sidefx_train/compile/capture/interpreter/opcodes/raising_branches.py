"""Finds branches that only raise, from the bytecode."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
    from sidefx_train.compile.capture.interpreter.code import CodeInfo

_MOST = 400
"""Limit of inspected instructions."""

_WAYS = {"POP_JUMP_IF_FALSE": False, "POP_JUMP_IF_TRUE": True}
_LEAVES = frozenset({"RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE", "RERAISE", "SEND", "RETURN_GENERATOR"})


def raising_truth(info: CodeInfo, instr: Instruction, following: int) -> bool | None:
    """Returns the truth of a condition for which the program can only raise.

    Args:
        info: the code.
        instr: the jump on the condition.
        following: index of the instruction after it.

    Returns:
        ``None`` if neither side or both sides can only raise.
    """
    jumps = _WAYS.get(instr.name)
    if jumps is None:
        return None
    there, here = _only_raises(info, instr.target), _only_raises(info, following)
    if there == here:
        return None
    return jumps if there else not jumps


def _only_raises(info: CodeInfo, start: int) -> bool:
    """Returns True if every path from an instruction ends in a ``raise``, and there is one."""
    todo, seen, raises = [start], set[int](), False
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        if len(seen) == _MOST or at >= len(info.instructions):
            return False
        seen.add(at)
        instr = info.instructions[at]
        if instr.name in _LEAVES:
            return False
        if instr.name == "RAISE_VARARGS":
            raises = True
            continue
        if instr.target >= 0:
            todo.append(instr.target)
        if instr.name != "JUMP":
            todo.append(at + 1)
    return raises
