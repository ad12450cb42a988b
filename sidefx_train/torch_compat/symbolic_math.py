"""Functions on symbolic numbers, and operations with numbers of subclasses."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental import sym_node
from torch.fx.experimental.proxy_tensor import handle_sym_dispatch

_node_of_number = sym_node.to_node

_known = threading.Lock(), [0]


def _node_of_derived(node: Any, number: Any) -> Any:
    """``to_node`` that converts instances of subclasses of ``int`` and ``float`` to plain numbers."""
    own = type(number) in NUMBERS or is_numpy_scalar(number)
    return _node_of_number(node, number if own else plain_number(number))


_UNEQUAL = (type(None), str, bytes, bytearray, tuple, list, dict, set, frozenset, range, slice, type)
"""Classes whose instances are unequal to every number."""

_EQUALITY = [(kind, name, vars(kind)[name]) for kind in (torch.SymInt, torch.SymFloat) for name in ("__eq__", "__ne__")]


def _with_objects(name: str, symbolic: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a comparison of symbolic numbers that compares the value, guarded, with numbers that torch does not
    know."""
    of_values = operator.eq if name == "__eq__" else operator.ne

    def compare(number: Any, other: Any) -> Any:
        found = symbolic(number, other)
        if found is not NotImplemented or isinstance(other, (*_UNEQUAL, torch.Tensor)):
            return found
        if getattr(type(other), "__eq__", None) is object.__eq__ or is_numpy_scalar(other):
            return found
        return of_values(int(number) if type(number) is torch.SymInt else float(number), other)

    return compare


_EQUALITY_WITH_OBJECTS = [(kind, name, _with_objects(name, symbolic)) for kind, name, symbolic in _EQUALITY]


def _of_unknown_bounds(bounds: Any) -> Any:
    """Returns the bounds of a function of which nothing is known."""
    from torch.utils._sympy.value_ranges import ValueRanges

    return ValueRanges.unknown()


_LACKED = staticmethod(_of_unknown_bounds)


@contextmanager
def numbers_as_in_python() -> Iterator[None]:
    """Context in which symbolic numbers accept members of enumerations etc., and are equal to a ``Decimal`` or a
    complex number of their value; in torch they are unequal to all of them. The analysis of bounds knows nothing about
    ``math.erf`` etc.; torch's raises for them."""
    from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis as Bounds

    lock, captures = _known
    with lock:
        captures[0] += 1
        sym_node.to_node = _node_of_derived
        for name in OPAQUE_NAMES:
            if not hasattr(Bounds, name):
                setattr(Bounds, name, _LACKED)
        for kind, name, compare in _EQUALITY_WITH_OBJECTS:
            setattr(kind, name, compare)
    try:
        yield
    finally:
        with lock:
            captures[0] -= 1
            if not captures[0]:
                sym_node.to_node = _node_of_number
                for kind, name, compare in _EQUALITY:
                    setattr(kind, name, compare)
                for name in [name for name in OPAQUE_NAMES if vars(Bounds).get(name) is _LACKED]:
                    delattr(Bounds, name)


def plain_number(value: Any) -> Any:
    """Returns an instance of a subclass of ``int`` or ``float`` as a plain number; anything else unchanged."""
    base = next((base for base in (int, float) if issubclass(type(value), base)), None)
    return value if base is None else base.__pos__(value)


def is_numpy_scalar(value: Any) -> bool:
    """Returns True for numpy numbers, some of which derive from ``float``."""
    return any(base.__module__ == "numpy" for base in type(value).__mro__)


def _opaque(name: str) -> Callable[[Any], Any]:
    """Returns ``math.name`` as a function that keeps a symbolic float symbolic, which torch lacks."""
    from torch.fx.experimental.sym_node import SymNode
    from torch.utils._sympy import functions

    function = getattr(math, name)
    expression = getattr(functions, f"OpaqueUnaryFn_{name}", None) or functions.make_opaque_unary_fn(name)

    def apply(value: Any) -> Any:
        if not isinstance(value, torch.SymFloat):
            return function(value)
        node = value.node
        hint = function(node.hint) if node.has_hint() else None
        return torch.SymFloat(SymNode(expression(node.expr), node.shape_env, float, hint))

    apply.__name__ = name
    return apply


def _traced(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Records a call on a symbolic number in the graph."""
    return lambda value: handle_sym_dispatch(function, (value,), {})


OPAQUE_NAMES = ("exp", "log", "log10", "log1p", "expm1", "erf")
_OPAQUE = {getattr(math, name): _opaque(name) for name in OPAQUE_NAMES}

SYMBOLIC_MATH: dict[Any, Callable[[Any], Any]] = {
    **{
        getattr(math, name): getattr(torch, f"_sym_{name}")
        for name in ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "acos", "asin", "atan", "log2")
    },
    **{function: _traced(opaque) for function, opaque in _OPAQUE.items()},
}
"""Variants of ``math`` functions that accept a symbolic float."""


def _larger(left: Any, right: Any) -> Any:
    return torch.sym_max(left, right)


def _smaller(left: Any, right: Any) -> Any:
    return torch.sym_min(left, right)


CHOICES: dict[Any, Callable[[Any, Any], Any]] = {
    max: lambda left, right: handle_sym_dispatch(_larger, (left, right), {}),
    min: lambda left, right: handle_sym_dispatch(_smaller, (left, right), {}),
}
"""Variants of ``max`` and ``min`` for symbolic numbers. Unlike torch's, they keep the order of the operands, by which
Python decides between ``0.0`` and ``-0.0``, and what to do with NaN."""


def host_functions() -> dict[Any, str]:
    """Returns the functions on Python numbers that a trace may contain, with Python expressions that call them."""
    table: dict[Any, str] = {
        torch.sym_float: "float",
        torch.sym_int: "int",
        torch.sym_max: "max",
        torch.sym_min: "min",
        _larger: "max",
        _smaller: "min",
        torch.sym_not: "not ",
        max: "max",
        min: "min",
        abs: "abs",
        operator.abs: "abs",
        float: "float",
        int: "int",
        bool: "bool",
        round: "round",
        pow: "pow",
    }
    for name in dir(math):
        function = getattr(math, name)
        if callable(function) and not name.startswith("_"):
            table[function] = f"math.{name}"
            symbolic = getattr(torch, f"_sym_{name}", None)
            if symbolic is not None:
                table[symbolic] = f"math.{name}"
    for function, opaque in _OPAQUE.items():
        table[opaque] = f"math.{function.__name__}"
    return table


def symbolic_function(function: Any) -> Any:
    """Returns the variant of a ``math`` function that accepts symbolic numbers, or else the function itself."""
    return getattr(torch, f"_sym_{getattr(function, '__name__', '')}", function)


NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
