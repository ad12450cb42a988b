"""C functions of symbolic numbers: conversions, ``math``, rounding, comparisons by identity and in containers."""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.constant_folding import constant_value
from sidefx_train.compile.capture.world.symbolic_numbers import graph_functions, integer_functions, number_subclasses
from sidefx_train.compile.capture.world.symbolic_numbers.concrete_numbers import concrete
from sidefx_train.compile.capture.world.symbolic_numbers.domain_errors import function_raises, no_integer
from sidefx_train.compile.capture.world.symbolic_numbers.scalar_tensors import host_value
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext

_PYTHON_NUMBERS = frozenset({int, float, bool, *compat.SYMBOLS})
_MOST_COMPARED = 64
"""Limit of comparisons with a symbolic number before it is specialized."""
_TO_INTEGER = (math.floor, math.ceil, math.trunc)
_OF_OTHERS = ("comb", "factorial", "gcd", "isqrt", "lcm", "ldexp", "perm", "trunc", "dist", "fsum", "prod", "sumprod")
_OF_FLOATS = frozenset(fn for name, fn in vars(math).items() if callable(fn) and name not in _OF_OTHERS)
"""Functions that convert each argument with ``float``, a tensor of one element, too."""


def one_object(left: Any, right: Any) -> Any:
    """``left is right`` for a symbolic number: Python may use one object for equal numbers."""
    kinds = (type(left), type(right))
    known = all(kind in _PYTHON_NUMBERS for kind in kinds) and any(kind in compat.SYMBOLS for kind in kinds)
    if left is right or not known:
        return ABSENT
    return concrete(left) is concrete(right)


def number_function(world: CaptureContext, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions of numbers that keep a symbolic argument symbolic; others get its value, which is guarded."""
    if type(fn).__hash__ is None:  # an object with a comparison of its own, such as a key of `functools.cmp_to_key`
        return ABSENT
    if fn in _OF_FLOATS and not kwargs and any(safe_isinstance(value, torch.Tensor) for value in args):
        converted = [world.interp.call(float, (x,), {}) if safe_isinstance(x, torch.Tensor) else x for x in args]
        return world.interp.call(fn, tuple(converted), {})
    if fn is round:
        args, kwargs = integer_functions.positional(args, kwargs)
    found = graph_functions.call(world, fn, args, kwargs)
    if found is not ABSENT:
        return found
    if kwargs or not any(safe_isinstance(value, compat.SYMBOLS) for value in args):
        return world.computed_numbers.call(fn, args, kwargs)
    found = number_subclasses.slot_operator(world, fn, args)
    if found is not ABSENT:
        return found
    if any(map(compat.numpy_class, args)):
        found = world.computed_numbers.call(fn, args, kwargs)
        if found is not ABSENT:
            return found
    to_integer = fn in _TO_INTEGER or (fn is round and (len(args) == 1 or args[1] is None))
    if to_integer and args:
        found = integer_functions.computed_integer(world, fn, args)
        if found is not ABSENT:
            return found
        if no_integer(world, args[0]):
            return world.guarded(fn, tuple(map(concrete, args)), {})
        found = integer_functions.unknown_integer(world, fn, args[0])
        if found is not ABSENT:
            return found
    if fn is divmod and len(args) == 2 and any(map(_is_of_graph, args)):
        return integer_functions.divided(world, args)
    if fn is round and type(args[0]) is torch.SymInt and len(args) == 2:
        found = world.computed_numbers.call(fn, args, kwargs)
        return integer_functions.rounded(world, args[0], concrete(args[1])) if found is ABSENT else found
    if fn in (bisect.bisect_left, bisect.bisect_right):
        return integer_functions.bisect(world, fn is bisect.bisect_right, *args)
    if not all(safe_isinstance(value, (torch.SymInt, torch.SymFloat, int, float)) for value in args):
        return world.computed_numbers.call(fn, args, kwargs)
    if function_raises(world, fn, args):
        return world.guarded(fn, tuple(map(concrete, args)), {})
    if any(type(value) is float and not math.isfinite(value) for value in args):  # sympy takes the others for finite
        return _computed(world, fn, args)
    symbolic = compat.SYMBOLIC_MATH.get(fn)
    if symbolic is not None:
        values = [symbolic(torch.sym_float(value)) for value in args]
        return values[0] / values[1] if fn is math.log and len(values) == 2 else values[0]
    if fn is math.pow:
        return torch.sym_float(args[0]) ** torch.sym_float(args[1])
    known = fn in _OF_FLOATS and fn not in _TO_INTEGER and not any(map(_is_of_graph, args))
    return _computed(world, fn, args) if known else world.computed_numbers.call(fn, args, kwargs)


def _is_of_graph(value: Any) -> bool:
    return safe_isinstance(value, compat.SYMBOLS) and compat.is_unbacked(value)


def _computed(world: CaptureContext, fn: Any, args: tuple[Any, ...]) -> Any:
    """Returns the number that the prologue computes, or else that of the values, which are guarded."""
    found = world.computed_numbers.call(fn, args, {})
    return world.guarded(fn, tuple(map(concrete, args)), {}) if found is ABSENT else found


def among(world: CaptureContext, container: Any, value: Any) -> Any:
    """``value in container`` for a symbolic integer and a few plain numbers: guards that it differs from them.

    Returns:
        :data:`ABSENT` in any other case; the number is specialized then.
    """
    base = next((kind for kind in (dict, set, frozenset) if safe_isinstance(container, kind)), None)
    if base is None or type(container).__contains__ is not base.__contains__ or compat.is_unbacked(value):
        return ABSENT
    world.touch(container, deep=False, asked="contains")
    items = list(base.__iter__(container))
    if len(items) > _MOST_COMPARED or not all(type(item) in (int, float) for item in items):
        return ABSENT
    return any(world.truth(value == item) for item in items)


def _truth_of_tensor(world: CaptureContext, value: torch.Tensor) -> Any:
    """``bool(x)``: a symbolic number where only the graph knows the value; a branch on it is checked there."""
    try:
        return world.truth(value)
    except Unsupported as stop:
        if stop.code != "SFX101" or value.numel() != 1:
            raise
    truth = value if value.dtype is torch.bool else value != 0
    return world.guarded(truth.item, (), {})


def convert_number(world: CaptureContext, kind: type, args: tuple[Any, ...]) -> Any:
    """``int(x)``, ``float(x)`` and ``bool(x)`` of tensors and symbolic numbers."""
    if len(args) != 1:
        return ABSENT
    value = args[0]
    if safe_isinstance(value, torch.Tensor):
        if kind is bool:
            return _truth_of_tensor(world, value)
        if type(size := value.numel()) is int and size != 1:
            with compat.real_world():
                return kind(torch.zeros(min(size, 2), dtype=value.dtype))  # raises
        known = constant_value(world.tracer, value)
        number = host_value(world, value) if known is None else known.item()
        if number is None:
            if value.dtype is torch.bool:
                value = value.to(torch.int64)  # a symbolic bool has no symbolic int
            number = world.guarded(value.item, (), {})
        value = number
    if not safe_isinstance(value, compat.SYMBOLS):
        return ABSENT if value is args[0] else kind(value)
    if kind is bool:
        return world.truth(value)
    value = world.heap.numbers.number_of(value)
    if compat.numpy_class(value) is not None:
        found = world.computed_numbers.call(kind, (value,), {})
        return world.guarded(kind, (concrete(value),), {}) if found is ABSENT else found
    if kind is int:
        found = integer_functions.computed_integer(world, int, (value,))
        if found is not ABSENT:
            return found
        if no_integer(world, value):
            return world.guarded(int, (concrete(value),), {})
        found = integer_functions.unknown_integer(world, int, value)
        if found is not ABSENT:
            return found
    return world.guarded(torch.sym_float if kind is float else torch.sym_int, (value,), {})
