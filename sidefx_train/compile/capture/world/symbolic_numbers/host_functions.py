"""Python functions that only compute with numbers, which the prologue can run as a whole.

``1.0 if step < warmup else decay ** (step - warmup)`` has a condition, and a guard on it for each of its sides if it is
interpreted. Called by the prologue, the function decides natively, and the graph gets its result.
"""

from __future__ import annotations

import builtins
import functools
import math
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction, decode
from sidefx_train.compile.capture.shadows.records import InstanceRecord
from sidefx_train.compile.common.host_programs import OF_NUMPY, PythonCall
from sidefx_train.compile.common.plain_values import PLAIN_TYPES
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import instance_dict, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI

_ALLOWED = frozenset(
    {
        "BINARY_OP", "BINARY_SLICE", "BINARY_SUBSCR", "BUILD_LIST", "BUILD_SLICE", "BUILD_STRING", "BUILD_TUPLE",
        "CALL", "CALL_KW", "COMPARE_OP", "CONTAINS_OP", "CONVERT_VALUE", "COPY", "COPY_FREE_VARS", "END_FOR",
        "FORMAT_SIMPLE", "FORMAT_VALUE", "FORMAT_WITH_SPEC", "FOR_ITER", "GET_ITER", "IS_OP", "JUMP",
        "JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP", "LIST_APPEND", "LOAD_ASSERTION_ERROR", "LOAD_CONST",
        "LOAD_FAST", "LOAD_FAST_AND_CLEAR", "LOAD_FAST_LOAD_FAST", "POP_JUMP_IF_FALSE", "POP_JUMP_IF_NONE",
        "POP_JUMP_IF_NOT_NONE", "POP_JUMP_IF_TRUE", "POP_TOP", "PUSH_NULL", "RAISE_VARARGS", "RETURN_CONST",
        "RETURN_VALUE", "STORE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST", "SWAP", "TO_BOOL",
        "UNARY_INVERT", "UNARY_NEGATIVE", "UNARY_NOT", "UNARY_POSITIVE", "UNPACK_SEQUENCE",
    }
)  # fmt: skip
"""Instructions that read and change nothing but their operands and the function's own variables."""

_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_DEREF"})
_VARIABLES = frozenset(
    {
        "LOAD_FAST", "LOAD_FAST_AND_CLEAR", "LOAD_FAST_LOAD_FAST", "STORE_FAST", "STORE_FAST_LOAD_FAST",
        "STORE_FAST_STORE_FAST",
    }
)  # fmt: skip
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_MODULES = (math, np)
_BUILTINS: frozenset[Any] = frozenset(
    {abs, all, any, bool, divmod, enumerate, float, int, len, max, min, pow, range, reversed, round, sum, zip}
)
_PLAIN_LOADS: frozenset[Any] = frozenset({object.__getattribute__, types.SimpleNamespace.__getattribute__})
_ERRORS = (ValueError, TypeError, AssertionError, ArithmeticError, LookupError)
_DEEPEST = 4
"""Limit of functions that call one another."""
_MOST_ITEMS = 256


def computes_numbers(world: CaptureWorldAPI, fn: Any) -> HostFunction | None:
    """Returns what is known of a function of the program that computes numbers from its arguments, constants, and
    variables and attributes from outside, which are guarded then; ``None`` for another function."""
    check = _Check(world)
    return HostFunction(check.warns) if check.of(fn, _DEEPEST) and check.guard() else None


class HostFunction(NamedTuple):
    """A function that only computes numbers.

    Attributes:
        warns: it calls functions of NumPy, which may warn.
    """

    warns: bool


def call(world: CaptureWorldAPI, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of such a function of numbers that change, if it decides on something and returns a float;
    else :data:`ABSENT`."""
    if not any(type(each) in (torch.SymInt, torch.SymFloat) for each in (*args, *kwargs.values())):
        return ABSENT
    record = world.heap.record_of(args[0]) if args else None
    if not _branches(fn) or (record is not None and record.base.kind != "const"):
        return ABSENT
    owner = () if record is None else (args[0],)
    check = _Check(world, *owner)
    if not check.of(fn, _DEEPEST, *owner):
        return ABSENT
    called = _Float(fn if record is None else types.MethodType(fn, record.real))
    found = world.computed_numbers.call(PythonCall(called, fn.__qualname__, check.warns), args[len(owner) :], kwargs)
    return found if found is not ABSENT and check.guard() else ABSENT


class _Float:
    """Calls a function, and raises an error if it does not return a float."""

    __slots__ = ("_function",)

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> float:
        result = self._function(*args, **kwargs)
        if type(result) is not float:
            raise TypeError("returns no float")
        return result


def _branches(fn: types.FunctionType) -> bool:
    return any(instr.name.startswith(("POP_JUMP_IF", "JUMP_IF", "FOR_ITER")) for instr in decode(fn.__code__))


class _Read(NamedTuple):
    """A read of a variable from outside, or of an attribute.

    Attributes:
        space: the globals, or ``None``.
        place: a name in them, a cell, or a shadow.
        attributes: names of attributes, from object to object.
        value: what is read, outside.
    """

    space: dict[str, Any] | None
    place: Any
    attributes: tuple[str, ...]
    value: Any


class _Check:
    """Checks what a function does, and then guards what it reads.

    Args:
        world: the world of the capture.
        owner: the shadow of the object that it is a method of, if it is one.

    Attributes:
        warns: the function calls functions of NumPy.
    """

    def __init__(self, world: CaptureWorldAPI, *owner: Any) -> None:
        self._world = world
        self._heap = world.heap
        self._owner = owner
        self._reads: list[_Read] = []
        self.warns = False

    def guard(self) -> bool:
        """Reads in the capture what the function reads; returns False if one of the values is known to change."""
        return all(map(self._guarded, self._reads))

    def _guarded(self, read: _Read) -> bool:
        if read.space is not None:
            value = self._world.variables.load_global(read.space, read.place)
        else:
            value = self._world.variables.load_cell(read.place) if type(read.place) is types.CellType else read.place
        for name in read.attributes:
            value = self._world.interp.getattr(value, name)
        if type(read.value) in (list, dict):
            self._world.touch(value)
            self._world.computed_numbers.tables.add(id(read.value))
            return type(value) is type(read.value) and value == read.value
        if type(read.value) in PLAIN_TYPES or type(read.value) is tuple:
            return type(value) is type(read.value) and repr(value) == repr(read.value)
        return value is read.value

    def of(self, fn: Any, depth: int, *owner: Any) -> bool:
        """Returns the answer for one function.

        Args:
            fn: the function.
            depth: how many functions may call one another.
            owner: what its first argument is, for a method.
        """
        if type(fn) is functools.partial:
            given = (*fn.args, *fn.keywords.values())
            return not instance_dict(fn) and all(map(_is_number, given)) and self.of(fn.func, depth)
        if type(fn) is not types.FunctionType or depth == 0 or id(fn) in self._world.new_functions:
            return False
        record = self._heap.record_of(fn)
        if record is not None and record.real is not fn:  # made anew for each call of the step
            return False
        given = (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
        if fn.__code__.co_flags & (_GENERATOR | _COROUTINE | _ASYNC_GENERATOR) or not all(map(_is_number, given)):
            return False
        instructions = decode(fn.__code__)
        position, tables, changes = 0, False, False
        while position < len(instructions):
            instr = instructions[position]
            position += 1
            if instr.name in _LOADS or (owner and instr.name == "LOAD_FAST" and instr.arg == 0):
                read, names = self._loaded(fn, instr), []
                while position < len(instructions) and instructions[position].name in _ATTRIBUTES:
                    names.append(instructions[position].value)
                    position += 1
                self.warns |= read.value is np
                value = functools.reduce(self._attribute, names, read.value)
                self.warns |= type(value) is np.ufunc
                self._reads.append(read._replace(attributes=tuple(names), value=value))
                tables |= type(value) in (list, dict)
                changes |= type(value) is types.FunctionType
                if not self._is_known(value, depth):
                    return False
            elif instr.name not in _ALLOWED or (owner and _takes_first(instr)):
                return False
            changes |= instr.name == "BINARY_OP" and instr.arg == 1
        return not (tables and changes)  # ``table += [1]`` by way of a variable

    def _loaded(self, fn: types.FunctionType, instr: Instruction) -> _Read:
        """Returns a read of a variable from outside; its value is :data:`ABSENT` if the step has set it."""
        if instr.name == "LOAD_FAST":
            record = self._heap.record_of(self._owner[0])
            return _Read(None, self._owner[0], (), ABSENT if record is None else record.real)
        if instr.name == "LOAD_DEREF":
            free = instr.arg - _first_free(fn.__code__)
            cell = (fn.__closure__ or ())[free] if free >= 0 else None
            return _Read(None, cell, (), ABSENT if cell is None else self._contents(cell))
        space, name = fn.__globals__, instr.value
        known = self._heap.namespaces.get(id(space))
        changed = known is not None and known.values.get(name, ABSENT) is not known.snapshot.get(name, ABSENT)
        value = space[name] if name in space else vars(builtins).get(name, ABSENT)
        return _Read(space, name, (), ABSENT if changed else value)

    def _contents(self, cell: types.CellType) -> Any:
        record = self._heap.cells.get(id(cell))
        if id(cell) in self._world.new_cells or (record is not None and record.value is not record.initial):
            return ABSENT
        try:
            return cell.cell_contents
        except ValueError:
            return ABSENT

    def _attribute(self, value: Any, name: str) -> Any:
        """Returns an attribute that lies in an object's own ``__dict__``, or a function of a module."""
        if any(value is module for module in _MODULES):
            return vars(value).get(name, ABSENT)
        kind = type(value)
        if safe_isinstance(value, (type, types.ModuleType)) or kind.__getattribute__ not in _PLAIN_LOADS:
            return ABSENT
        found = [vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)]
        if any("__set__" in vars(base) for each in found for base in type(each).__mro__):
            return ABSENT
        record = self._heap.by_real.get(id(value))
        read_only = safe_isinstance(record, InstanceRecord) and not record.shared and name not in record.written
        if record is not None and not read_only:
            return ABSENT
        try:
            return instance_dict(value).get(name, ABSENT)
        except AttributeError:
            return ABSENT

    def _is_known(self, value: Any, depth: int) -> bool:
        if _is_number(value):
            return True
        if type(value) in (list, dict):
            items = (*value, *value.values()) if type(value) is dict else value
            unread = id(value) not in self._heap.by_real or id(value) in self._world.computed_numbers.tables
            return unread and len(items) <= _MOST_ITEMS and all(map(_is_number, items))
        if type(value) is types.FunctionType:
            return self.of(value, depth - 1)
        if type(value) is np.ufunc:
            return vars(np).get(value.__name__) is value
        if type(value) is types.BuiltinFunctionType:
            return value in _BUILTINS or vars(math).get(value.__name__) is value
        return type(value) is type and (value in _BUILTINS or value in _ERRORS or value in OF_NUMPY)


def _takes_first(instr: Instruction) -> bool:
    """Returns True for an instruction that reads or sets the first variable in another way than a plain load."""
    both = instr.name in ("LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST")
    return instr.name in _VARIABLES and 0 in ((instr.arg, instr.value) if both else (instr.arg,))


_GENERATOR, _COROUTINE, _ASYNC_GENERATOR = 0x20, 0x80, 0x200


def _first_free(code: types.CodeType) -> int:
    """Returns the slot of the first free variable."""
    return len(code.co_varnames) + sum(name not in code.co_varnames for name in code.co_cellvars)


def _is_number(value: Any) -> bool:
    return type(value) in PLAIN_TYPES or (type(value) is tuple and all(map(_is_number, value)))
