"""The differences between the bytecode of CPython 3.11 to 3.14, all in this file.

:func:`decode` converts a code object to instructions with the same names for all versions. Caches and ``EXTENDED_ARG``
are removed, jump targets are indices into the result, names and constants are resolved. A conditional jump converts its
condition to ``bool``: what 3.13 and 3.14 have for this before the jump is removed. Sources: the ``dis`` module
documentation of each version and ``Objects/exception_handling_notes.txt``.
"""

from __future__ import annotations

import dis
import itertools
import opcode
import sys
import types
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from sidefx_train.compile.common.type_checks import attribute_of

VERSION = sys.version_info[:2]

SEND_KEEPS_RECEIVER = VERSION >= (3, 12)
"""At the end of a ``yield from`` the receiver stays on the stack until ``END_SEND``."""

TYPE_PARAMETERS_IN_C = VERSION >= (3, 12)
"""``TypeVar`` and similar classes are C code that takes the defining module from CPython's running frame."""

ATTRIBUTE_MAY_BE_METHOD = VERSION >= (3, 12)
"""The lowest bit of ``LOAD_ATTR`` says that the attribute is called as a method; 3.11 has ``LOAD_METHOD``."""

CLOSE_RETURNS = VERSION >= (3, 13)
"""``generator.close()`` returns the generator's return value."""

UNPACKING_COUNTS = VERSION >= (3, 14)
"""The error for too many values to unpack says how many a list, tuple or dict has."""

INTRINSICS_PUSH = VERSION >= (3, 12)
"""``import *`` and printing an expression are intrinsics, which push a result."""

NULL_IS_UPPER = VERSION >= (3, 13)
"""The empty one of a call's two callable slots lies above the callable, not below."""

FOR_ITER_SKIP = {(3, 11): 0, (3, 12): 1, (3, 13): 2}.get(VERSION, 2)
"""Number of instructions after a loop to skip when its iterator is exhausted (``END_FOR``, ``POP_TOP``)."""

FOR_ITER_END = ("END_FOR", "POP_ITER" if VERSION >= (3, 14) else "POP_TOP")[:FOR_ITER_SKIP]
"""Those instructions."""

ENTERS_BY_CALL = VERSION >= (3, 14)
"""A ``with`` statement looks up two methods and calls ``__enter__`` by ``CALL``; before, one instruction did all."""

ENTRIES_OF_EXIT = 2 if ENTERS_BY_CALL else 1
"""Number of stack entries in which ``__exit__`` lies in a ``with`` statement."""

ALWAYS_HAS_KEYWORDS = VERSION >= (3, 14)
"""``CALL_FUNCTION_EX`` takes an entry for keyword arguments from the stack, which is empty if there are none."""

SUBSCRIPT_IS_BINARY_OP = VERSION >= (3, 14)
"""``BINARY_OP`` reads an item; before, ``BINARY_SUBSCR`` did."""

DOCSTRING_HAS_FLAG = VERSION >= (3, 14)
"""The first constant is the docstring if a flag of the code says so; before, if it is a string."""


def _annotate_is_named() -> bool:
    space: dict[str, Any] = {}
    exec(compile("def fn(value: int): pass", "<annotations>", "exec", dont_inherit=True), space)
    return attribute_of(attribute_of(space["fn"], "__annotate__"), "__qualname__") == "fn.__annotate__"


ANNOTATE_IS_NAMED = _annotate_is_named()
"""What computes the annotations of a function is named after it: not in the first releases of 3.14."""

COMPARE_SHIFT = {(3, 11): 0, (3, 12): 4}.get(VERSION, 5)
COMPARE_NAMES = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
BINARY_NAMES = {
    "+": "add", "&": "and_", "//": "floordiv", "<<": "lshift", "@": "matmul", "*": "mul", "%": "mod", "|": "or_",
    "**": "pow", ">>": "rshift", "-": "sub", "/": "truediv", "^": "xor",
}  # fmt: skip

_NOPS = frozenset({"NOP", "RESUME", "PRECALL", "RESUME_CHECK", "NOT_TAKEN"})
_RENAMED = {
    "LOAD_FAST_CHECK": "LOAD_FAST",
    "LOAD_FAST_BORROW": "LOAD_FAST",
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": "LOAD_FAST_LOAD_FAST",
    "LOAD_SMALL_INT": "LOAD_CONST",
    "LOAD_COMMON_CONSTANT": "LOAD_CONST",
    "POP_ITER": "POP_TOP",
    "JUMP_BACKWARD": "JUMP",
    "JUMP_FORWARD": "JUMP",
    "JUMP_BACKWARD_NO_INTERRUPT": "JUMP",
    "POP_JUMP_FORWARD_IF_FALSE": "POP_JUMP_IF_FALSE",
    "POP_JUMP_BACKWARD_IF_FALSE": "POP_JUMP_IF_FALSE",
    "POP_JUMP_FORWARD_IF_TRUE": "POP_JUMP_IF_TRUE",
    "POP_JUMP_BACKWARD_IF_TRUE": "POP_JUMP_IF_TRUE",
    "POP_JUMP_FORWARD_IF_NONE": "POP_JUMP_IF_NONE",
    "POP_JUMP_BACKWARD_IF_NONE": "POP_JUMP_IF_NONE",
    "POP_JUMP_FORWARD_IF_NOT_NONE": "POP_JUMP_IF_NOT_NONE",
    "POP_JUMP_BACKWARD_IF_NOT_NONE": "POP_JUMP_IF_NOT_NONE",
    "LOAD_CLOSURE": "LOAD_SLOT",
}
if VERSION >= (3, 13):
    _RENAMED["MAKE_FUNCTION"] = "MAKE_PLAIN_FUNCTION"
_INTRINSIC_1 = {
    "INTRINSIC_1_INVALID": "INVALID",
    "INTRINSIC_PRINT": "PRINT_EXPR",
    "INTRINSIC_IMPORT_STAR": "IMPORT_STAR",
    "INTRINSIC_STOPITERATION_ERROR": "STOPITERATION_ERROR",
    "INTRINSIC_ASYNC_GEN_WRAP": "ASYNC_GEN_WRAP",
    "INTRINSIC_UNARY_POSITIVE": "UNARY_POSITIVE",
    "INTRINSIC_LIST_TO_TUPLE": "LIST_TO_TUPLE",
    "INTRINSIC_TYPEVAR": "MAKE_TYPEVAR",
    "INTRINSIC_PARAMSPEC": "MAKE_PARAMSPEC",
    "INTRINSIC_TYPEVARTUPLE": "MAKE_TYPEVARTUPLE",
    "INTRINSIC_SUBSCRIPT_GENERIC": "SUBSCRIPT_GENERIC",
    "INTRINSIC_TYPEALIAS": "MAKE_TYPEALIAS",
}
_INTRINSIC_2 = {
    "INTRINSIC_PREP_RERAISE_STAR": "PREP_RERAISE_STAR",
    "INTRINSIC_TYPEVAR_WITH_BOUND": "TYPEVAR_WITH_BOUND",
    "INTRINSIC_TYPEVAR_WITH_CONSTRAINTS": "TYPEVAR_WITH_CONSTRAINTS",
    "INTRINSIC_SET_FUNCTION_TYPE_PARAMS": "SET_FUNCTION_TYPE_PARAMS",
    "INTRINSIC_SET_TYPEPARAM_DEFAULT": "SET_TYPEPARAM_DEFAULT",
}

_NAMED = frozenset(
    {
        "STORE_NAME", "DELETE_NAME", "STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME",
        "IMPORT_NAME", "IMPORT_FROM", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_METHOD",
    }
)  # fmt: skip
_PAIRS = frozenset(
    {"LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"}
)
JUMPS_ON_TRUTH = frozenset({"POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE"})
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
_HAS_DOCSTRING = 0x4000000


class Instruction:
    """One decoded instruction.

    Attributes:
        run: the handler, set by ``dispatch.py``.
        name: opcode name, the same for all versions.
        arg: numeric argument (slot number, count, flags).
        value: resolved argument: a name, a constant, a tuple of keyword names.
        target: index of the instruction jumped to, -1 if it does not jump.
        offset: byte offset in ``co_code``; of a conditional jump that of its first part, which converts the condition.
        handler: ``(target index, stack depth, push_lasti)`` of the exception table, or ``None``.
    """

    __slots__ = ("arg", "handler", "name", "offset", "run", "target", "value")

    def __init__(self, name: str, arg: int, value: Any, offset: int, target: int = -1) -> None:
        self.run: Any = None
        self.name = name
        self.arg = arg
        self.value = value
        self.target = target
        self.offset = offset
        self.handler: tuple[int, int, bool] | None = None

    def __repr__(self) -> str:
        return f"<{self.offset} {self.name} {self.arg} {self.value!r} ->{self.target}>"


def slot_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of the fast-local slots: variables, then cells that are not arguments, then free variables."""
    names = code.co_varnames
    return names + tuple(name for name in code.co_cellvars if name not in names) + code.co_freevars


def decode(code: types.CodeType) -> list[Instruction]:
    """Decodes the instructions of ``code``, with their exception handlers."""
    raw = code.co_code
    result: list[Instruction] = []
    index_of: dict[int, int] = {}
    jumps: list[Instruction] = []
    extended = 0
    kw_names: tuple[str, ...] | None = None
    converted: int | None = None
    position, size = 0, len(raw)
    while position < size:
        op, arg = raw[position], raw[position + 1] | extended
        index_of[position] = len(result)
        if op == _EXTENDED_ARG:
            extended = arg << 8
            position += 2
            continue
        extended = 0
        after = position + 2
        while after < size and raw[after] == 0:  # inline caches
            after += 2
        name = dis.opname[op]
        target = -1
        if op in _JUMPS:
            target = after - 2 * arg if "BACKWARD" in name else after + 2 * arg
        if name == "KW_NAMES":
            kw_names = code.co_consts[arg]
            name, arg = "NOP", 0
        if name in _NOPS:
            position = after
            continue
        if name == "TO_BOOL" and _jumps_on_truth(raw, after):
            converted, position = position, after
            continue
        instr = _common(code, name, arg, position if converted is None else converted, target)
        converted = None
        if instr.name == "CALL" and kw_names is not None:
            instr.value, kw_names = kw_names, None
        if target >= 0:
            jumps.append(instr)
        result.append(instr)
        if instr.name == "COMPARE_OP" and instr.arg:
            instr.arg = 0
            if _jumps_on_truth(raw, after):
                converted = position
            else:
                result.append(Instruction("TO_BOOL", 0, None, position))
        position = after
    for instr in jumps:
        instr.target = index_of[instr.target] + (FOR_ITER_SKIP if instr.name == "FOR_ITER" else 0)
    for before, instr in itertools.pairwise(result):
        if instr.name == "YIELD_VALUE" and before.name == "SEND":
            instr.target = before.target
    offsets = [instr.offset for instr in result]
    for start, end, goal, depth, lasti in exception_table(code):
        entry = (index_of[goal], depth, lasti)
        for instr in result[bisect_left(offsets, start) : bisect_left(offsets, end)]:
            instr.handler = entry
    return result


def _jumps_on_truth(raw: bytes, position: int) -> bool:
    while position < len(raw) and (raw[position] == _EXTENDED_ARG or dis.opname[raw[position]] in _NOPS):
        position += 2
    return position < len(raw) and dis.opname[raw[position]] in JUMPS_ON_TRUTH


def _common(code: types.CodeType, name: str, arg: int, offset: int, target: int) -> Instruction:
    """Decodes one instruction to its common name."""
    value: Any = None
    if name in ("LOAD_CONST", "RETURN_CONST"):
        value = code.co_consts[arg]
    elif name in _NAMED:
        value = code.co_names[arg]
    elif name == "LOAD_GLOBAL":
        value = code.co_names[arg >> 1]
        arg &= 1
    elif name == "LOAD_ATTR":
        if VERSION >= (3, 12):
            name = "LOAD_METHOD" if arg & 1 else "LOAD_ATTR"
            arg >>= 1
        value = code.co_names[arg]
    elif name == "LOAD_SUPER_ATTR":
        value = code.co_names[arg >> 2]
        arg &= 3
    elif name == "COMPARE_OP":
        value = COMPARE_NAMES[dis.cmp_op[arg >> COMPARE_SHIFT]]
        arg = 1 if VERSION >= (3, 13) and arg & 16 else 0  # its result is converted to bool
    elif name == "LOAD_SMALL_INT":
        value = arg
    elif name == "LOAD_COMMON_CONSTANT":
        value = dis._common_constants[arg]  # type: ignore[attr-defined]
    elif name == "LOAD_SPECIAL":
        value = dis._special_method_names[arg]  # type: ignore[attr-defined]
    elif name == "CALL_FUNCTION_EX" and ALWAYS_HAS_KEYWORDS:
        arg = 1
    elif name == "BINARY_OP" and opcode._nb_ops[arg][1] == "[]":  # type: ignore[attr-defined]
        name = "BINARY_SUBSCR"
    elif name == "BINARY_OP":
        symbol = opcode._nb_ops[arg][1]  # type: ignore[attr-defined]
        inplace = symbol.endswith("=")
        base = BINARY_NAMES[symbol[:-1] if inplace else symbol]
        value = "i" + base.rstrip("_") if inplace else base
        arg = int(inplace)
    elif name in _PAIRS:
        value = arg & 15
        arg >>= 4
    elif name == "CALL_INTRINSIC_1":
        name = _INTRINSIC_1.get(dis._intrinsic_1_descs[arg], "INVALID")  # type: ignore[attr-defined]
    elif name == "CALL_INTRINSIC_2":
        name = _INTRINSIC_2.get(dis._intrinsic_2_descs[arg], "INVALID")  # type: ignore[attr-defined]
    return Instruction(_RENAMED.get(name, name), arg, value, offset, target)


def entered_contexts(instructions: Sequence[Instruction]) -> Iterator[tuple[int, int]]:
    """Yields for each ``with`` statement the index of the instruction that calls ``__enter__``, and the number of stack
    entries that belong to the context before it."""
    for index, instr in enumerate(instructions):
        if instr.name == "BEFORE_WITH":
            yield index, 1
        elif instr.name == "LOAD_SPECIAL" and instr.value == "__enter__":
            yield index + 1, 4


def docstring(code: types.CodeType) -> str | None:
    """Returns the docstring of a function created from ``code``."""
    first = code.co_consts[0] if code.co_consts else None
    has = code.co_flags & _HAS_DOCSTRING if DOCSTRING_HAS_FLAG else type(first) is str
    return first if has else None


def exception_table(code: types.CodeType) -> list[tuple[int, int, int, int, bool]]:
    """Returns the entries ``(start, end, target, depth, push_lasti)`` of ``co_exceptiontable``, in byte offsets."""
    stream = iter(code.co_exceptiontable)

    def number(first: int) -> int:
        value = first & 63
        while first & 64:
            first = next(stream)
            value = value << 6 | first & 63
        return value

    entries = []
    for byte in stream:
        start, length, target, packed = number(byte), number(next(stream)), number(next(stream)), number(next(stream))
        entries.append((start * 2, (start + length) * 2, target * 2, packed >> 1, bool(packed & 1)))
    return entries
