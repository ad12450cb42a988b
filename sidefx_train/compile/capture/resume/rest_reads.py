"""Decides from code whether the rest of a frame only reads its tensors, records them or passes them on.

It is a guess, which saves a capture: what runs natively is watched, and captured if it computes after all.
"""

from __future__ import annotations

import types
from typing import Any

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
from sidefx_train.compile.capture.interpreter.frame import Frame

_TENSOR, _CONTAINER = object(), object()
"""What is known of a value: a tensor, a container with tensors. Of others: the name by which it was loaded, or
``None``."""

_READS_TENSOR = frozenset(
    {"detach", "item", "tolist", "numpy", "cpu", "size", "shape", "dim", "ndim", "numel", "dtype", "device"}
)
_OF_CONTAINER = frozenset({"append", "copy", "extend", "get", "items", "keys", "pop", "setdefault", "update", "values"})
_TAKES_TENSOR = frozenset(
    {"float", "int", "bool", "len", "str", "repr", "print", "format", "dict", "list", "tuple", "isinstance", "type"}
    | {"add_scalar", "add_scalars", "append", "debug", "extend", "info", "log", "log_dict", "log_metrics", "put"}
    | {"put_nowait", "put_scalar", "put_scalars", "record", "register", "set_postfix", "setdefault", "update", "write"}
)
"""Names of functions and methods that read or record a tensor."""

_PUSHES = frozenset({"LOAD_CONST", "LOAD_DEREF", "LOAD_NAME", "PUSH_NULL", "FOR_ITER", "LOAD_ASSERTION_ERROR"})
_POPS = frozenset(
    {"POP_TOP", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME"}
    | {"DICT_MERGE", "DICT_UPDATE", "LIST_APPEND", "LIST_EXTEND", "SET_ADD", "SET_UPDATE"}
)
_COMBINES = frozenset({"BINARY_OP", "COMPARE_OP", "CONTAINS_OP"})
_COUNTED = {"BUILD_TUPLE": 1, "BUILD_LIST": 1, "BUILD_SET": 1, "BUILD_STRING": 1, "BUILD_MAP": 2}
"""How many values for each of its count an instruction takes."""
_NOTHING = frozenset({"NOP", "KW_NAMES"})
_LEAVES = frozenset({"JUMP", "RAISE_VARARGS", "RERAISE", "RETURN_CONST"})


def only_reads(frame: Frame, is_new: bool) -> bool:
    """Returns True if the rest of a frame's code only reads its tensors, records them or passes them on.

    Args:
        frame: the frame.
        is_new: it has been entered since the last tensor operation: a loop in it has computed nothing so far.
    """
    rest = frame.instructions[frame.pc :]
    stack: list[Any] = [*map(_kind, frame.stack), None]  # with the result of the instruction that runs
    if any(0 <= instr.target < frame.pc for instr in rest):
        if not is_new:
            return False
        rest, stack = frame.instructions, []
    scan = _Scan(stack, dict(enumerate(map(_kind, frame.locals))))
    return all(map(scan.passes, rest))


def _kind(value: Any) -> Any:
    if type(value) is compat.FakeTensor:
        return _TENSOR
    if type(value) in (types.FunctionType, types.BuiltinFunctionType, types.MethodType):
        return value.__name__
    return _CONTAINER if _has_tensors(value) else None


def _has_tensors(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(map(_has_tensors, value))
    return any(map(_has_tensors, value.values())) if type(value) is dict else type(value) is compat.FakeTensor


class _Scan:
    """Follows tensors through instructions, in their order.

    Args:
        stack: what is known of the values on the stack.
        variables: the same of local variables, by slot.
    """

    def __init__(self, stack: list[Any], variables: dict[int, Any]) -> None:
        self._stack, self._variables = stack, variables

    def _take(self, count: int) -> list[Any]:
        first = max(len(self._stack) - count, 0)
        taken = self._stack[first:]
        del self._stack[first:]
        return taken

    def passes(self, instr: Instruction) -> bool:
        """Follows one instruction; returns False if it may compute with a tensor."""
        name, stack = instr.name, self._stack
        if name in _PUSHES:
            stack.append(None)
        elif name in ("LOAD_FAST", "LOAD_SLOT"):
            stack.append(self._variables.get(instr.arg))
        elif name == "LOAD_FAST_LOAD_FAST":
            stack += [self._variables.get(instr.arg), self._variables.get(instr.value)]
        elif name == "STORE_FAST":
            self._store(instr.arg)
        elif name == "STORE_FAST_LOAD_FAST":
            self._store(instr.arg)
            stack.append(self._variables.get(instr.value))
        elif name == "STORE_FAST_STORE_FAST":
            self._store(instr.arg)
            self._store(instr.value)
        elif name == "LOAD_GLOBAL":
            stack += [instr.value, None][: 1 + bool(instr.arg)]
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            return self._attribute(instr)
        elif name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX"):
            return self._call(instr)
        elif name in _COUNTED or name == "BUILD_CONST_KEY_MAP":
            taken = self._take(instr.arg * _COUNTED.get(name, 1) + (name == "BUILD_CONST_KEY_MAP"))
            stack.append(_CONTAINER if _tensors(taken) and name != "BUILD_STRING" else None)
        elif name.startswith(("FORMAT_", "CONVERT_")):
            self._take(2 if name == "FORMAT_WITH_SPEC" or (name == "FORMAT_VALUE" and instr.arg & 4) else 1)
            stack.append(None)
        elif name == "BINARY_SUBSCR":
            taken = self._take(2)
            stack.append(_TENSOR if _CONTAINER in taken[:1] else None)
            return _TENSOR not in taken
        elif name == "STORE_SUBSCR":
            return _TENSOR not in self._take(3)[1:]
        elif name == "STORE_ATTR":
            return _TENSOR not in self._take(2)[1:]
        elif name in _COMBINES:
            taken = self._take(2)
            stack.append(None)
            return _TENSOR not in taken
        elif name in _POPS:
            self._take(1)
        elif name == "RETURN_VALUE":
            self._take(1)
            used = not _tensors(stack)  # else the values on the stack are others than it seems
            stack.clear()
            return used
        elif name.startswith("POP_JUMP_IF_") or name == "GET_ITER":
            taken = self._take(1)
            stack += [None] * (name == "GET_ITER")
            return _TENSOR not in taken or name.endswith("NONE")
        elif name in _LEAVES:
            stack.clear()
        elif name not in _NOTHING:
            known = not _tensors(stack)
            stack.clear()
            return known
        return True

    def _store(self, slot: int) -> None:
        taken = self._take(1)
        self._variables[slot] = taken[0] if taken else None

    def _attribute(self, instr: Instruction) -> bool:
        (owner,) = self._take(1) or [None]
        self._stack += [instr.value, None][: 1 + (instr.name == "LOAD_METHOD")]
        if owner is _TENSOR:
            return instr.value in _READS_TENSOR
        return owner is not _CONTAINER or instr.value in _OF_CONTAINER

    def _call(self, instr: Instruction) -> bool:
        count = {"CALL": instr.arg, "CALL_KW": instr.arg + 1}.get(instr.name, 1 + (instr.arg & 1))
        taken = self._take(count)
        callee = next((each for each in self._take(2) if type(each) is str), "")
        self._stack.append(None)
        return not _tensors(taken) or callee in _TAKES_TENSOR


def _tensors(values: list[Any]) -> bool:
    return _TENSOR in values or _CONTAINER in values
