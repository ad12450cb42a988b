"""Liveness analysis: variables that a code object may still read after an instruction."""

from __future__ import annotations

from sidefx_train.compile.capture.interpreter.bytecode_versions import VERSION, Instruction
from sidefx_train.compile.capture.interpreter.code import CodeInfo

_READS = frozenset({"LOAD_FAST", "DELETE_FAST", "LOAD_FAST_AND_CLEAR", "LOAD_SLOT", "MAKE_CELL"})
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP", "RETURN_GENERATOR"})
_READS_VARIABLES = frozenset({"locals", "vars", "dir", "eval", "exec"})
"""Builtins that read the variables of the code that calls them."""

_GETS_FRAMES = frozenset({"_getframe", "currentframe"})
_HAVE_STACK = frozenset({"torch", "th", "np", "numpy"})
"""Names under which programs import libraries that have a function called ``stack``."""

_LOADS_NAME = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})


def live_slots(info: CodeInfo, index: int) -> frozenset[int]:
    """Returns the slots whose value the instruction at ``index``, or one after it, may read.

    Every use of a variable in a cell counts as a read. Code that can access its own variables by name reads all.
    """
    everything = frozenset(range(len(info.slots)))
    if _sees_all(info):
        return everything
    instructions = info.instructions
    before: list[frozenset[int]] = [frozenset()] * len(instructions)
    effects = [_effect(instr) for instr in instructions]
    for i in super_calls(info):
        effects[i] = frozenset({0}), effects[i][1]
    changed = True
    while changed:
        changed = False
        for i in range(len(instructions) - 1, -1, -1):
            instr = instructions[i]
            after: frozenset[int] = frozenset()
            if instr.name not in _ENDS and i + 1 < len(instructions):
                after |= before[i + 1]
            if instr.target >= 0:
                after |= before[instr.target]
            reads, writes = effects[i]
            found = reads | (after - writes)
            if instr.handler is not None:
                found |= before[instr.handler[0]]
            if found != before[i]:
                before[i] = found
                changed = True
    return before[index] & everything


def _sees_all(info: CodeInfo) -> bool:
    """Returns True for code that may read its own variables by name, also through ``builtins`` or ``inspect.stack``.

    A method called ``eval``, as modules have one, reads none, nor does the ``stack`` of torch and NumPy.
    """
    names = set(info.code.co_names)
    if names & _GETS_FRAMES:
        return True
    loaded = {instr.value for instr in info.instructions if instr.name in _LOADS_NAME}
    if _READS_VARIABLES & (names if "builtins" in names else loaded):
        return True
    owners = [None, *(instr.value if instr.name in _LOADS_NAME else None for instr in info.instructions)]
    users = zip(owners, info.instructions, strict=False)
    return "stack" in names and any(instr.value == "stack" and owner not in _HAVE_STACK for owner, instr in users)


def super_calls(info: CodeInfo) -> frozenset[int]:
    """Returns the indices of ``super()`` calls that read the class and the first argument from the frame.

    Since Python 3.12 the compiler loads both.
    """
    code, instructions = info.code, info.instructions
    if VERSION >= (3, 12) or "__class__" not in code.co_freevars or not code.co_argcount:
        return frozenset()
    return frozenset(
        i
        for i in range(1, len(instructions))
        if (instructions[i].name, instructions[i].arg) == ("CALL", 0)
        and (instructions[i - 1].name, instructions[i - 1].value) == ("LOAD_GLOBAL", "super")
    )


def reads(instr: Instruction) -> frozenset[int]:
    """Returns the slots that an instruction reads."""
    return _effect(instr)[0]


def own_effect(instr: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """Returns (slots that an instruction binds, slots that it unbinds)."""
    if instr.name in ("DELETE_FAST", "LOAD_FAST_AND_CLEAR"):
        return frozenset(), frozenset({instr.arg})
    return _effect(instr)[1], frozenset()


def _effect(instr: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """Returns (slots read, slots written)."""
    name, arg, value = instr.name, instr.arg, instr.value
    nothing: frozenset[int] = frozenset()
    if name in _READS or name.endswith("DEREF"):
        return frozenset({arg}), nothing
    if name == "STORE_FAST":
        return nothing, frozenset({arg})
    if name == "LOAD_FAST_LOAD_FAST":
        return frozenset({arg, value}), nothing
    if name == "STORE_FAST_LOAD_FAST":
        return frozenset({value}) - frozenset({arg}), frozenset({arg})
    if name == "STORE_FAST_STORE_FAST":
        return nothing, frozenset({arg, value})
    return nothing, nothing
