"""Objects that C code converts by special methods written in Python: to a position, a number, a sequence, an array."""

from __future__ import annotations

import types
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.capture.interpreter.object_model import operators
from sidefx_train.compile.capture.interpreter.object_model.attributes import is_static
from sidefx_train.compile.capture.recording.symbolic_indexing import decided
from sidefx_train.compile.capture.shadows.containers.traversal import attributes_of
from sidefx_train.compile.capture.world.native_call_facts import inside
from sidefx_train.compile.capture.world.symbolic_numbers.concrete_numbers import concrete_within
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.positioned_iterators import TYPES
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext

_SEQUENCES = (list, tuple, str, bytes, bytearray, deque, range)
_AT_POSITION = frozenset(
    {"insert", "pop", "__getitem__", "__setitem__", "__delitem__", "__mul__", "__imul__", "rotate"}
)
_CONVERSIONS = ("__index__", "__float__", "__int__", "__complex__", "__bool__", "__len__", "__getitem__", "__array__")
_SUBSCRIPTS = frozenset({"__getitem__", "__setitem__"})
_OF_SEQUENCES = ("__len__", "__getitem__", "__iter__")
_OTHER_KINDS = (torch.Tensor, torch.nn.Module, int, float, str, dict, set, types.ModuleType, type)
"""Objects that torch takes as they are, or whose contents it reads in C."""


def with_position(world: CaptureContext, fn: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of a method of a sequence of C with a plain integer as the position."""
    if attribute_of(fn, "__name__", "") not in _AT_POSITION or not args:
        return args
    if safe_isinstance(attribute_of(fn, "__self__"), _SEQUENCES):
        return (decided(operators.position(world.interp, args[0])), *args[1:])
    if len(args) > 1 and safe_isinstance(args[0], _SEQUENCES):
        return (args[0], decided(operators.position(world.interp, args[1])), *args[2:])
    return args


def refuse_in_torch(world: CaptureContext, fn: Any, args: tuple[Any, ...]) -> None:
    """Refuses a call of torch with an object that it would convert: it does so as often as its parsers like, and not at
    all in a replay."""
    name = attribute_of(fn, "__name__", "")
    if name.startswith("__") and name not in _SUBSCRIPTS:  # an operator: the other operand has its turn
        return
    for value in (*args, *inside(args)):
        cls = type(value)
        if is_static(cls) or issubclass(cls, _OTHER_KINDS) or is_library(cls.__module__):
            continue
        if compat.overrides_functions(cls):  # torch calls its ``__torch_function__``
            continue
        names = _OF_SEQUENCES if issubclass(cls, (list, tuple)) else _CONVERSIONS
        if any(type(getattr(cls, name, None)) is types.FunctionType for name in names):
            what = f"{trace_rules.describe(fn)} converts a {trace_rules.describe(cls)} by methods written in Python"
            world.heap.refuse("SFX111", what)


def refuse_to_numpy(world: CaptureContext, fn: Any, args: tuple[Any, ...]) -> None:
    """Refuses to give NumPy what it reads past the interpreter: a generator, of which it asks the class, and sequences
    of libraries in Python (``UserList``) with symbolic numbers."""
    for value in inside(args):
        cls = type(value)
        if cls is InterpretedGenerator and fn is not np.fromiter:
            world.heap.refuse("SFX104", f"{trace_rules.describe(fn)} gets a generator of the step")
        if is_static(cls) or type(getattr(cls, "__getitem__", None)) is not types.FunctionType:
            continue
        if is_library(cls.__module__) and concrete_within(held := attributes_of(value)) is not held:
            world.heap.refuse("SFX104", f"{trace_rules.describe(fn)} reads numbers in a {trace_rules.describe(cls)}")


def refuse_arrays(world: CaptureContext, fn: Any, args: tuple[Any, ...]) -> None:
    """Refuses calls of NumPy that call Python code past the interpreter: methods of an array's class, the function that
    is told of floating-point errors."""
    values = (attribute_of(fn, "__self__"), *args)
    for value in values:
        cls = value if safe_isinstance(value, type) else type(value)
        if issubclass(cls, np.ndarray) and not is_static(cls) and not is_library(cls.__module__):
            what = f"{trace_rules.describe(fn)} gets a {trace_rules.describe(cls)}, an array of a class of the program"
            world.heap.refuse("SFX104", what)
    if type(fn) is not np.ufunc and not any(safe_isinstance(value, (np.ndarray, np.generic)) for value in values):
        return
    world.context.guard_numpy_errors()
    reports = _REPORTS.intersection(np.geterr().values())
    if reports:
        world.heap.refuse("SFX104", f"{trace_rules.describe(fn)}: NumPy is set to {min(reports)} floating-point errors")


_REPORTS = frozenset({"call", "log", "print"})


def check_printing(world: CaptureContext, fn: Any, args: tuple[Any, ...]) -> None:
    """Guards how NumPy prints arrays if C code is about to make text of one; refuses text of an outside autograd node
    and of an outside iterator, whose addresses are others in the capture."""
    if attribute_of(fn, "__name__", "").strip("_") not in _MAKES_TEXT:
        return
    leaves = [leaf for value in (attribute_of(fn, "__self__"), *args) for leaf in inside(value)]
    if any(safe_isinstance(leaf, (np.ndarray, np.generic)) for leaf in leaves):
        world.context.guard_numpy_printing()
    if world.heap.outside_nodes and any(id(leaf) in world.heap.outside_nodes for leaf in leaves):
        world.heap.refuse("SFX111", "makes text of a node in an autograd graph from before the step")
    if any(type(leaf) in TYPES and world.heap.record_of(leaf) is not None for leaf in leaves):
        world.heap.refuse("SFX103", "makes text of an iterator from before the step")


_MAKES_TEXT = frozenset(
    {"str", "repr", "ascii", "format", "format_map", "mod", "rmod", "array2string", "array_str", "array_repr"}
)
