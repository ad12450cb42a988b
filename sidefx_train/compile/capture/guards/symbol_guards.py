"""Guards on symbolic numbers, as Python source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import NumberCondition
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.common.source_literals import literal

CONDITION_NAMES: dict[str, Any] = {"math": math, "torch": torch}
"""Names that the source of a number condition may use."""

_ROUNDING = 1e-12
"""Bound of the rounding error of a sum in double precision, relative to the sum of its terms' magnitudes."""


def number_conditions(
    expressions: list[Any], sources: dict[str, Source], values: Mapping[str, Any] | None = None
) -> tuple[list[NumberCondition], list[Any]]:
    """Converts recorded sympy conditions to Python source.

    Sympy reorders sums and products of floats, so its result is exact only up to rounding. A condition is used if it
    holds by more than the rounding error. Otherwise, and where a result became a constant of the graph, the numbers
    must be equal to those of the capture.

    Args:
        expressions: sympy conditions that held during the capture.
        sources: where each symbol (by name) is found.
        values: values of the symbols during the capture; for a symbol without a value, sympy's result is trusted.

    Returns:
        The conditions over known sources, and those that mention anything else (values that exist only after the graph
        has run; the capture itself decided them).
    """
    conditions: list[NumberCondition] = []
    others: list[Any] = []
    for expression in expressions:
        symbols = sorted(str(symbol) for symbol in expression.free_symbols)
        if not symbols:
            continue
        if any(symbol not in sources for symbol in symbols):
            others.append(expression)
            continue
        known = {symbol: values[symbol] for symbol in symbols if values and symbol in values}
        code = compat.python_source(expression)
        if len(known) == len(symbols):
            code = " and ".join(
                [
                    _distinct(expression) if compat.rounds(expression) else code,
                    *map(_integral, compat.truncates(expression)),
                ]
            )
            if not eval(code, {**CONDITION_NAMES, **known}) or _takes_zeros_for_equal(expression, known):
                conditions += [_exactly(symbol, value, sources[symbol]) for symbol, value in known.items()]
                continue
        conditions.append(NumberCondition(code, tuple((symbol, sources[symbol]) for symbol in symbols)))
    return conditions, others


def _takes_zeros_for_equal(expression: Any, known: Mapping[str, Any]) -> bool:
    """Returns True for an equality that holds for 0.0 and -0.0, one of which became a constant of the capture."""
    has_zero = any(type(value) is float and value == 0 for value in known.values())
    return has_zero and expression.func.__name__ == "Equality"


def _exactly(symbol: str, value: Any, source: Source) -> NumberCondition:
    names = ((symbol, source),)
    if value != value:
        return NumberCondition(f"{symbol} != {symbol}", names)
    value = float(value) if isinstance(value, float) else value  # a number of NumPy has no literal
    same = f"{symbol} == {literal(value)}"
    if type(value) is float and value == 0:  # -0.0 behaves differently in a division
        same += f" and math.copysign(1.0, {symbol}) == {math.copysign(1.0, value)}"
    return NumberCondition(same, names)


def _distinct(expression: Any) -> str:
    """Returns an inequality that holds by more than the rounding error; ``False`` for other conditions."""
    if expression.func.__name__ not in _MARGINS:
        return "False"
    sign, operator = _MARGINS[expression.func.__name__]
    left, right = (compat.python_source(side) for side in expression.args)
    margin = _margin(*expression.args)
    if operator == "!=":
        return f"abs(({left}) - ({right})) > {margin}"
    return f"({left}) {operator} ({right}) {sign} {margin}"


def _integral(expression: Any) -> str:
    """Returns a test that truncation is unambiguous: the distance to whole and half numbers exceeds the rounding
    error."""
    twice = f"2 * ({compat.python_source(expression)})"
    return f"abs({twice} - math.floor({twice} + 0.5)) > {_margin(expression, expression)}"


def _margin(*expressions: Any) -> str:
    terms = [compat.python_source(term) for expression in expressions for term in compat.terms_of(expression)]
    return f"{_ROUNDING} * ({' + '.join(f'abs({term})' for term in terms)})"


_MARGINS = {
    "StrictLessThan": ("-", "<"),
    "LessThan": ("-", "<="),
    "StrictGreaterThan": ("+", ">"),
    "GreaterThan": ("+", ">="),
    "Unequality": ("", "!="),
}
"""(sign of the margin added to the right side, Python operator) by sympy's name of a relation."""


def size_conditions(sizes: list[tuple[Any, Source]], sources: dict[str, Source]) -> list[NumberCondition]:
    """Returns conditions that equate symbolic sizes and strides of inputs with their symbols.

    Args:
        sizes: each size with its source.
        sources: source of each symbol; symbols of the sizes are added.
    """
    conditions: list[NumberCondition] = []
    for size, source in sizes:
        expression = compat.symbol_of_input(size)
        name = str(expression)
        if expression.is_Symbol and name not in sources:
            sources[name] = source
            conditions.append(NumberCondition(f"{name} > 1", ((name, source),)))  # torch treats 0 and 1 specially
            continue
        names = tuple((str(symbol), sources[str(symbol)]) for symbol in sorted(expression.free_symbols, key=str))
        conditions.append(NumberCondition(f"found == {compat.python_source(expression)}", (("found", source), *names)))
    return conditions
