"""Symbolic numbers: the shape environment of a capture, its symbols, and their Python source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import _lru_cache_wrapper, lru_cache, partial
from types import FunctionType
from typing import Any

import sympy
import torch
from torch._guards import Source
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, SLoc
from torch.utils._sympy.symbol import SymT, symbol_is_type

from sidefx_train.torch_compat.early_imports import NEEDED, _load_submodule

_CACHED_OF_TABLES = [(name, value) for name, value in vars(ShapeEnv).items() if type(value) is _lru_cache_wrapper]
_CACHED_BY_VERSION = [
    (name, vars(value)["__wrapped__"])
    for name, value in vars(ShapeEnv).items()
    if type(value) is FunctionType and hasattr(value, "cache_clear")
]
"""Methods whose caches, one for all tables as well, are emptied when a table is asked that has another version."""

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Classes of numbers that stand for a symbol."""


class _QuietShapeEnv(ShapeEnv):
    """Skips the search for the user's line of every symbol: the capture knows it, and the search imports half of
    ``torch.export``.

    torch's global caches about this environment, some without a limit, are cleared with it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, method in _CACHED_OF_TABLES:
            limit = method.cache_parameters()["maxsize"]
            self.__dict__[name] = lru_cache(limit)(partial(method.__wrapped__, self))
        for name, plain in _CACHED_BY_VERSION:
            cached: Any = symbolic_shapes._lru_cache(plain)
            bound: Any = partial(cached, self)
            bound.cache_clear, bound.cache_info = cached.cache_clear, cached.cache_info
            self.__dict__[name] = bound

    def _get_stack_summary(self, *args: Any, **kwargs: Any) -> tuple[SLoc, str]:
        return SLoc("", None), ""


class _Conditions(list[Any]):
    """The recorded conditions of a shape environment; calls ``noted`` after each."""

    def __init__(self, conditions: list[Any], noted: Callable[[], None]) -> None:
        super().__init__(conditions)
        self._noted = noted

    def append(self, condition: Any) -> None:
        super().append(condition)
        self._noted()


def on_condition(shape_env: ShapeEnv, noted: Callable[[], None] | None) -> None:
    """Calls ``noted`` whenever a shape environment records a condition on its symbols; ``None`` ends that."""
    shape_env.guards = list(shape_env.guards) if noted is None else _Conditions(shape_env.guards, noted)


def new_shape_env() -> ShapeEnv:
    """Returns the shape environment of one capture; a tensor's ``item()`` may become a symbol."""
    _load_submodule(NEEDED)
    return _QuietShapeEnv(allow_scalar_outputs=True)


@dataclass(frozen=True)
class _NamedSource(Source):
    """Source of a symbol, given by a name of this library."""

    label: str

    @property
    def _name_template(self) -> str:
        return self.label


def new_symbolic_number(shape_env: ShapeEnv, value: int | float, name: str) -> Any:
    """Returns a symbolic int or float whose value during the capture is ``value``; 0 and 1 are not special."""
    source: Any = _NamedSource(f"{name}#{len(shape_env.var_to_range)}")
    if isinstance(value, float):
        symbol = shape_env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        return shape_env.create_symfloatnode(symbol, hint=value, source=source)
    return shape_env.create_unspecified_symint_and_symbol(value, source, DimDynamic.DYNAMIC)


def new_unknown_number(shape_env: ShapeEnv) -> torch.SymFloat:
    """Returns a symbolic float without a value during the capture."""
    return shape_env.create_unbacked_symfloat()


def mark_numpy(number: Any, kind: type) -> None:
    """Notes that a symbolic number stands for a number of NumPy of class ``kind``."""
    number.numpy_class = kind


def numpy_class(value: Any) -> type | None:
    """Returns the class of the number of NumPy that a symbolic number stands for; ``None`` for any other value."""
    return value.__dict__.get("numpy_class") if type(value) in (torch.SymInt, torch.SymFloat) else None


def symbol_of(number: Any) -> Any:
    """Returns the sympy expression of a symbolic number."""
    return number.node.expr


def comes_from_float(number: torch.SymInt) -> bool:
    """Returns True for an integer computed from a symbolic float."""
    return any(symbol_is_type(symbol, SymT.FLOAT) for symbol in number.node.expr.free_symbols)


def forgets_symbol(operands: tuple[Any, ...], result: Any) -> bool:
    """Returns True if the result of an operator on floats does not depend on one of its symbols, in sympy's view.

    Sympy takes symbols for finite numbers and has one zero: ``x * 0`` and ``x - x`` are zero, ``x == x`` is true. A
    number that only the graph knows is not asked for.
    """
    of_floats = any(type(each) in (float, torch.SymFloat) for each in operands)
    if not of_floats or type(result) not in (*SYMBOLS, int, float, bool):
        return False
    kinds = (torch.SymFloat,) if type(result) in (int, torch.SymInt) else (torch.SymFloat, torch.SymInt)
    before = {symbol for each in operands if type(each) in kinds for symbol in each.node.expr.free_symbols}
    kept = result.node.expr.free_symbols if type(result) in SYMBOLS else ()
    return any(not symbol_is_type(symbol, _UNBACKED) for symbol in before.difference(kept))


_UNBACKED = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)


def is_symbolic_integer(value: Any) -> bool:
    """Returns True for a symbolic integer; runs no code of the value."""
    return type(value) is torch.SymInt


def are_changing_integers(*numbers: Any) -> bool:
    """Returns True if some numbers are symbolic integers, all with values that may be compared."""
    symbols = [each for each in numbers if is_symbolic_integer(each)]
    return bool(symbols) and not any(map(is_unbacked, symbols))


def is_unbacked(number: Any) -> bool:
    """Returns True if the number is known only when the graph runs (it depends on data)."""
    return not number.node.has_hint()


def known_truth(condition: torch.SymBool) -> bool | None:
    """Returns the truth of a condition if it does not depend on its numbers; else ``None``."""
    expression = condition.node.expr
    if expression not in (True, False) and is_unbacked(condition):
        expression = condition.node.shape_env._maybe_evaluate_static(expression)
    return bool(expression) if expression in (True, False) else None


def recorded_conditions(shape_env: ShapeEnv) -> list[Any]:
    """Returns the sympy conditions on input symbols that the capture relied on."""
    return [guard.expr for guard in shape_env.guards]


def deferred_conditions(shape_env: ShapeEnv) -> list[Any]:
    """Returns the sympy conditions on numbers of the graph that fake kernels have required, without duplicates."""
    noted = [each.expr for conditions in shape_env.deferred_runtime_asserts.values() for each in conditions]
    return list(dict.fromkeys(noted))


def interpret_symbolic(operations: Any, values: dict[Any, Any], expression: Any) -> Any:
    """Computes a sympy expression by the methods of ``operations``, from the values of its symbols."""
    from torch.utils._sympy.interp import sympy_interp

    return sympy_interp(operations, values, expression)


def is_equality(condition: Any) -> bool:
    """Returns True for a condition that fixes a number."""
    return isinstance(condition, sympy.Eq)


def has_unbacked_sizes(value: Any) -> bool:
    """Returns True for tensors with a size that only the running graph knows."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    return any(
        isinstance(size, torch.SymInt) and is_unbacked(size)
        for each in values
        if isinstance(each, torch.Tensor)
        for size in each.shape
    )


def unbound_symbols(values: Iterable[Any]) -> set[Any]:
    """Returns the symbols in sizes, strides and offsets of tensors and in numbers that none of them is by itself.

    A graph with these inputs cannot compute such a symbol: ``u0`` and ``u1`` of a size ``u0 + u1``.
    """
    used: set[Any] = set()
    bound: set[Any] = set()
    for value in values:
        strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
        parts = (
            (*value.shape, *value.stride(), value.storage_offset()) if strided else getattr(value, "shape", (value,))
        )
        for part in parts:
            if isinstance(part, torch.SymInt):
                expression = part.node.expr
                used |= expression.free_symbols
                if expression.is_Symbol:
                    bound.add(expression)
    return used - bound


def dimension_of(value: Any, symbol: Any) -> int | None:
    """Returns the dimension of a tensor whose size is a symbol by itself, if there is one."""
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    is_it = (isinstance(size, torch.SymInt) and size.node.expr == symbol for size in sizes)
    return next((i for i, found in enumerate(is_it) if found), None)


def rounds(relation: Any) -> bool:
    """Returns True for a comparison of values computed from symbolic floats."""
    sides = [side for side in relation.args if not side.is_Atom and not side.is_integer]
    return any(symbol_is_type(symbol, SymT.FLOAT) for side in sides for symbol in side.free_symbols)


def truncates(expression: Any) -> list[Any]:
    """Returns subexpressions of symbolic floats that are converted to integers (``int``, ``round``)."""
    made = (part for part in sympy.preorder_traversal(expression) if part.func.__name__ in _INTEGER_OF)
    inner = (part.args[0] for part in made if not part.args[0].is_Atom)
    return [part for part in inner if any(symbol_is_type(symbol, SymT.FLOAT) for symbol in part.free_symbols)]


_INTEGER_OF = frozenset({"TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt"})


def terms_of(expression: Any) -> tuple[Any, ...]:
    """Returns the terms of a sum in sympy."""
    return tuple(expression.args) if expression.is_Add else (expression,)


def symbol_names(number: torch.SymInt | torch.SymFloat) -> list[str]:
    """Returns the names of the symbols that a symbolic number is computed from."""
    return sorted(map(str, number.node.expr.free_symbols))


def has_integers_only(number: torch.SymInt) -> bool:
    """Returns True if a symbolic number is computed without any float."""
    return all(part.is_integer for part in sympy.preorder_traversal(number.node.expr))


def symbol_name(number: torch.SymInt | torch.SymFloat) -> str:
    """Returns the name of a symbolic number that is a symbol."""
    return str(number.node.expr)


def python_source(expression: Any) -> str:
    """Returns a symbolic condition as a Python expression over the names of its symbols, ``math`` and ``torch``."""
    from torch.utils._sympy.printers import PythonPrinter

    class Printer(PythonPrinter):
        def _print_Function(self, expr: Any) -> str:
            kind, _, name = expr.func.__name__.partition("_")
            if kind != "OpaqueUnaryFn":
                return str(super()._print_Function(expr))
            return f"math.{name}({self._print(expr.args[0])})"

        def _print_IntInfinity(self, expr: Any) -> str:
            return "math.inf"

        def _print_NegativeIntInfinity(self, expr: Any) -> str:
            return "(-math.inf)"

        def _print_ComplexInfinity(self, expr: Any) -> str:
            return "math.nan"  # of no sign: the condition does not hold

        def _print_NumberSymbol(self, expr: Any) -> str:
            return repr(float(expr))  # pi, e

    return Printer().doprint(expression)


def symbol_of_input(number: Any) -> Any:
    """Returns the symbol with which a symbolic input was created, even if it was replaced since."""
    return number.node._expr


def hint_of(number: Any) -> Any:
    """Returns the value of a symbolic number during the capture, without adding a guard."""
    return number.node.hint


UNHASHABLE_NUMBER = ("unhashable type: non-nested SymInt",)
"""Arguments of the TypeError that hashing a symbolic integer raises."""
