"""Operators on a symbolic number and a number of another class, whose own methods define the result.

Those are subclasses of ``int`` and ``float`` (including members of enumerations, mostly without methods of their own)
and numpy's scalars. This module also handles direct calls of ``int.__add__`` and similar, which reject a symbolic
number.
"""

from __future__ import annotations

import enum
import operator
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.object_model import operators
from sidefx_train.compile.capture.interpreter.object_model.attributes import special
from sidefx_train.compile.capture.world.symbolic_numbers.domain_errors import operator_raises
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


_BASES = (int, float)


def decides(world: CaptureContext, name: str, operands: tuple[Any, ...]) -> bool:
    """Returns True if the class of the other operand defines the operator in Python."""
    if not any(type(value) in compat.SYMBOLS for value in operands) or needs_value(operands):
        return False
    derived = [value for value in operands if type(value) not in operators.SIMPLE and issubclass(type(value), _BASES)]
    methods = operators.methods_of(name)
    return any(special(world.interp, value, method) is not ABSENT for value in derived for method in methods)


def needs_value(operands: tuple[Any, ...]) -> bool:
    """Returns True if the other operand converts a symbolic number to a type of its own: a numpy scalar, a flag."""
    if not any(type(value) in compat.SYMBOLS for value in operands):
        return False
    if any(map(compat.numpy_class, operands)):
        kinds = (int, float, np.generic, *compat.SYMBOLS)
        return all(safe_isinstance(value, kinds) for value in operands)
    others = [value for value in operands if type(value) not in compat.SYMBOLS]
    return any(compat.is_numpy_scalar(value) or safe_isinstance(value, enum.Flag) for value in others)


def slot_operator(world: CaptureContext, fn: Any, args: tuple[Any, ...]) -> Any:
    """``int.__add__(a, b)``, ``(2).__add__(b)`` and similar with a symbolic number; else :data:`ABSENT`."""
    if type(fn) is types.MethodWrapperType:
        fn, args = getattr(fn.__objclass__, fn.__name__), (fn.__self__, *args)
    if type(fn) is not types.WrapperDescriptorType or fn.__objclass__ not in _BASES or len(args) != 2:
        return ABSENT
    name, swapped = _BY_METHOD.get(fn.__name__, ("", False))
    if not name or not any(type(value) in compat.SYMBOLS for value in args):
        return ABSENT
    takes = (int, torch.SymInt, torch.SymBool) if fn.__objclass__ is int else (int, float, *compat.SYMBOLS)
    if not all(safe_isinstance(value, takes) for value in args):
        return NotImplemented
    numbers = tuple(bool(value) if type(value) is torch.SymBool else compat.plain_number(value) for value in args)
    if swapped:
        numbers = numbers[::-1]
    if operator_raises(world, name, numbers):
        return ABSENT
    return getattr(operator, name)(*numbers)


_COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
_ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift",
)  # fmt: skip
_BY_METHOD = {f"__{name.rstrip('_')}__": (name, False) for name in _COMPARISONS + _ARITHMETIC}
_BY_METHOD |= {f"__r{name.rstrip('_')}__": (name, True) for name in _ARITHMETIC}
