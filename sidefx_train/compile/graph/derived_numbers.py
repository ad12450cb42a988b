"""What torch's C++ code computes from a number of a call before it passes it on: ``1 - p`` of dropout.

Each function is written with the operations, in the order, of the C++ code, so that it rounds as that does, and applies
to symbolic numbers, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sidefx_train import torch_compat as compat

Derived = tuple[Callable[[Any], Any], set[str]]

BOUNDS = (-math.inf, -1.0, 0.0, 1.0, 2.0, math.inf)
"""Numbers with which C++ code compares others."""

LARGE = 1e308
"""Greatest number that counts as finite in guards."""

_ROOT, _LOG = compat.SYMBOLIC_MATH[math.sqrt], compat.SYMBOLIC_MATH[math.log]
_ALPHA = 1.7580993408473766
"""Scale of ``alpha_dropout``."""


def _alpha_scale(p: Any) -> Any:
    return 1.0 / _ROOT((_ALPHA * _ALPHA * p + 1) * (1 - p))


_STEPS: dict[str, Callable[[Any], Any]] = {
    "1 - x": lambda x: 1 - x,
    "x - 1": lambda x: x - 1,
    "x - 2": lambda x: x - 2,
    "-x": lambda x: -x,
    "1 / x": lambda x: 1.0 / x,
    "x + 1": lambda x: x + 1,
}
"""What C++ code computes with a number; derivatives do so repeatedly (``1 / (1 - p)``)."""
_WHOLE: tuple[Callable[[Any], Any], ...] = (
    _ROOT,
    _LOG,
    lambda x: x / 2.0,
    _alpha_scale,
    lambda x: _ALPHA * _alpha_scale(x),
    lambda x: _ALPHA * _alpha_scale(x) * x,
)
_DEPTH = 3


def derived(value: float, sizes: Iterable[int], totals: Iterable[int] = ()) -> dict[float, Derived]:
    """Returns what C++ code computes with a number, by the result: the function, and every way to name it.

    Args:
        value: the number.
        sizes: those of the tensors of the call.
        totals: numbers of elements that the call may reduce to one.
    """
    known: dict[float, Derived] = {}

    def add(name: str, constant: float, function: Callable[[Any], Any]) -> None:
        if constant not in BOUNDS:
            known.setdefault(constant, (function, set()))[1].add(name)

    add("x", value, lambda x: x)
    level: dict[str, tuple[float, Callable[[Any], Any]]] = {"x": (value, lambda x: x)}
    for _ in range(_DEPTH):
        above = {}
        for name, (constant, inner) in level.items():
            for label, step in _STEPS.items():
                if constant != 0.0:
                    above[f"{name}, {label}"] = made, function = step(constant), _after(step, inner)
                    add(f"{name}, {label}", made, function)
        level = above
    for size in sorted(sizes):
        add(f"x / {size}", value / size, _divided(size))
    for total in sorted(totals):
        if value != total:
            add(f"2 / ({total} - x)", 2.0 / (total - value), _of_variance(total))
    for number, whole in enumerate(_WHOLE):
        try:
            add(f"function {number}", whole(value), whole)
        except (ValueError, ZeroDivisionError):
            continue
    return known


def derived_of_single(value: float) -> dict[float, Derived]:
    """Returns what C++ code computes with a number that it has rounded to float32, as functions of the rounded one."""
    single = as_single(value)
    return {single: (lambda x: x, {"float32"}), 1.0 / single: (lambda x: 1.0 / x, {"1 / float32"})} if single else {}


def as_single(value: float) -> float:
    """Rounds a number to float32."""
    return float(np.float32(value))


def _divided(size: int) -> Callable[[Any], Any]:
    return lambda x: x / size


def _of_variance(total: int) -> Callable[[Any], Any]:
    return lambda x: 2.0 / (total - x)


def _after(step: Callable[[Any], Any], inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: step(inner(x))
