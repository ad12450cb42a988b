"""Errors of arithmetic with symbolic numbers.

A replay computes only the results that are used: a division by zero would be missed if its result is unused, and found
late otherwise. So each operation that may raise first tests its operands, which adds a guard to the entry; if it does
raise, it runs on the numbers' values. If the number exists only when the graph runs, and its bounds do not decide, the
graph checks that the operation does not raise; if that cannot be expressed, the capture breaks at the operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.world.symbolic_numbers.number_bounds import decided, power_overflows
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


_DIVISIONS = frozenset({"truediv", "floordiv", "mod", "itruediv", "ifloordiv", "imod"})
_SHIFTS = frozenset({"lshift", "rshift", "ilshift", "irshift"})
_POWERS = frozenset({"pow", "ipow"})
_MAY_RAISE = _DIVISIONS | _SHIFTS | _POWERS
_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_NUMBERS = frozenset({int, float, bool, *_SYMBOLIC})
_LARGEST_EXPONENT = 709.0
"""``math.exp`` of it is a float; that of 710 is not."""

_DOMAINS: dict[Any, tuple[Callable[[Any], Any], ...]] = {
    math.sqrt: (lambda x: x >= 0,),
    math.log: (lambda x: x > 0,),
    math.log2: (lambda x: x > 0,),
    math.log10: (lambda x: x > 0,),
    math.log1p: (lambda x: x > -1,),
    math.acos: (lambda x: x >= -1, lambda x: x <= 1),
    math.asin: (lambda x: x >= -1, lambda x: x <= 1),
    math.exp: (lambda x: x <= _LARGEST_EXPONENT,),
    math.expm1: (lambda x: x <= _LARGEST_EXPONENT,),
    math.cosh: (lambda x: x >= -_LARGEST_EXPONENT, lambda x: x <= _LARGEST_EXPONENT),
    math.sinh: (lambda x: x >= -_LARGEST_EXPONENT, lambda x: x <= _LARGEST_EXPONENT),
}


def operator_raises(world: CaptureContext, name: str, args: tuple[Any, ...]) -> bool:
    """Returns True if an operation of Python numbers, one of them symbolic, raises an error; guards the answer."""
    if name not in _MAY_RAISE or len(args) != 2 or not _changes(args):
        return False
    left, right = args
    if name in _DIVISIONS:
        return _asked(world, right == 0)
    if name in _SHIFTS:
        return _asked(world, right < 0)
    return _asked(world, right < 0) and _asked(world, left == 0)


def needs_values(world: CaptureContext, name: str, args: tuple[Any, ...]) -> bool:
    """Returns True for an operation whose symbolic form differs.

    Of floats, torch divides before it takes the floor, and bounds a remainder as if it were an integer. Sympy's power
    of integers has no bounds for a negative base, and no code in C++.
    """
    of_integers = len(args) == 2 and type(args[0]) in (int, torch.SymInt) and type(args[1]) is torch.SymInt
    if of_integers and name in _POWERS and not compat.is_unbacked(args[1]):
        return True
    if (
        len(args) != 2
        or not _changes(args)
        or not any(safe_isinstance(value, (float, torch.SymFloat)) for value in args)
    ):
        return False
    if name in _POWERS:  # undefined for a negative float
        if safe_isinstance(args[0], _SYMBOLIC) and compat.is_unbacked(args[0]):
            _check_power(world, *args)
            return False
        return not _asked(world, args[0] >= 0)
    if name in ("mod", "imod"):
        return not any(safe_isinstance(value, _SYMBOLIC) and compat.is_unbacked(value) for value in args)
    return name in ("floordiv", "ifloordiv")


def _check_power(world: CaptureContext, base: Any, exponent: Any) -> None:
    """Refuses a power of a number that only the graph knows if it may raise an error, or be complex."""
    if power_overflows(world.tracer, base, exponent) or (exponent % 1 != 0 and not _asked(world, base >= 0)):
        _refuse(world)


def function_raises(world: CaptureContext, fn: Any, args: tuple[Any, ...]) -> bool:
    """Returns True if a function of ``math`` raises for symbolic numbers; guards the answer."""
    if not _changes(args):
        return False
    if fn is math.pow:
        return not _asked(world, args[0] > 0, unknown=True)
    if not all(_asked(world, holds(value), unknown=True) for value in args for holds in _DOMAINS.get(fn, ())):
        return True
    return fn is math.log and len(args) == 2 and _asked(world, args[1] == 1)


def no_integer(world: CaptureContext, value: Any) -> bool:
    """Returns True if a symbolic float cannot be converted to an integer of 64 bits."""
    if type(value) is not torch.SymFloat:
        return False
    return not (_asked(world, value <= 2.0**62, unknown=True) and _asked(world, value >= -(2.0**62), unknown=True))


def _changes(args: tuple[Any, ...]) -> bool:
    """Returns True if all arguments are numbers and one is symbolic."""
    return all(type(value) in _NUMBERS for value in args) and any(safe_isinstance(value, _SYMBOLIC) for value in args)


def _asked(world: CaptureContext, condition: Any, unknown: bool = False) -> bool:
    """Returns the truth of a condition and guards it.

    Args:
        world: the world of the capture.
        condition: a condition on numbers, some symbolic.
        unknown: the answer for a library's arithmetic with unbacked numbers, which is assumed not to raise.
    """
    if not safe_isinstance(condition, torch.SymBool):
        return bool(condition)
    if not compat.is_unbacked(condition):
        return bool(world.truth(condition))
    known = decided(world.tracer, condition)
    if known is not None:
        return known
    frame = world.interp.current_frame
    if frame is not None and world.heap.trusts(frame.globals):
        return unknown
    if world.grant(condition, unknown):
        return unknown
    _refuse(world)


def _refuse(world: CaptureContext) -> NoReturn:
    world.heap.refuse("SFX101", "does arithmetic that may raise, with a value that exists only when the graph runs")
