"""Arithmetic of Python numbers in 0-dim tensors: integers in int64, floats in float64."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from sidefx_train.compile.capture.world.symbolic_numbers import number_bounds
from sidefx_train.compile.functionalization.tensor_scalar_ops import TensorScalar
from sidefx_train.compile.ops.number_operators import round_number
from sidefx_train.errors import BackendError

LARGEST = 2.0**63
"""Integers from this absolute value on do not fit in 64 bits."""
_EXACT = 2.0**53
_GROWING = (operator.add, operator.sub, operator.mul, operator.pow, operator.neg, operator.abs)


def number_in(tensor: torch.Tensor) -> TensorScalar:
    """Returns the number that a tensor of one element holds."""
    return TensorScalar(tensor.reshape(()).to(torch.float64 if tensor.is_floating_point() else torch.int64))


def wide_numbers(late: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Returns the nodes of arithmetic on integers that may leave 64 bits, or divide integers that are no floats.

    Args:
        late: the numbers that the graph computes.
    """
    return frozenset(node for node in late if node.all_input_nodes and _is_wide(node))


def _is_wide(node: fx.Node) -> bool:
    if node.target is operator.truediv:
        return any(number_bounds.of_node(each).largest > _EXACT for each in node.all_input_nodes)
    return node.target in _GROWING and number_bounds.of_node(node).largest >= LARGEST


def _tensor(x: Any, like: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.full_like(like, x)


def _on_tensors(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, y: function(_tensor(x, y), _tensor(y, x))


def _divisor(y: Any) -> Any:
    """Returns a divisor of integers; the graph checks elsewhere that it is not zero, at which kernels raise."""
    integers = isinstance(y, torch.Tensor) and not y.is_floating_point()
    return torch.where(y == 0, 1, y) if integers else y


_OF_INTEGERS: dict[str, Callable[..., torch.Tensor]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": _on_tensors(lambda x, y: torch.div(x, _divisor(y), rounding_mode="floor")),
    "mod": _on_tensors(lambda x, y: torch.remainder(x, _divisor(y))),
    "neg": operator.neg,
    "abs": torch.abs,
    "and_": operator.and_,
    "or_": operator.or_,
    "xor": operator.xor,
    "max": _on_tensors(torch.maximum),
    "min": _on_tensors(torch.minimum),
    "sym_max": _on_tensors(torch.maximum),
    "sym_min": _on_tensors(torch.minimum),
}
"""Functions whose results are integers if their arguments are."""

_OF_FLOATS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: rule for name, rule in _OF_INTEGERS.items() if name not in ("and_", "or_", "xor")},
    "truediv": operator.truediv,
    "pow": torch.pow,
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "round": lambda x, digits=None: torch.round(x) if digits is None else round_number(x, digits),
    **{
        name: getattr(torch, name)
        for name in (
            *("log", "log2", "log10", "log1p", "expm1", "erf", "sin", "cos", "tan", "sinh", "cosh", "tanh"),
            *("asin", "acos", "atan", "floor", "ceil", "trunc"),
        )
    },
    "sym_float": lambda x: x,
    "float": lambda x: x,
}


def call_number(function: Any, args: tuple[Any, ...]) -> TensorScalar:
    """Runs arithmetic on numbers, some of them 0-dim tensors.

    Raises:
        BackendError: no tensor form is known.
    """
    name = getattr(function, "__name__", str(function)).removeprefix("_sym_")
    values = [value.value if isinstance(value, TensorScalar) else value for value in args]
    if all(map(_is_integer, values)):
        if name in _OF_INTEGERS:
            return TensorScalar(_OF_INTEGERS[name](*values))
        if name == "pow" and type(values[1]) is int and values[1] >= 0:
            return TensorScalar(torch.pow(*values))
    rule = _OF_FLOATS.get(name)
    if rule is None:
        raise BackendError("SFX201", f"{name}() of a number that the graph computes, used by a tensor operation")
    if name != "round":
        values = [value.double() if isinstance(value, torch.Tensor) else value for value in values]
    return TensorScalar(rule(*values))


def _is_integer(value: Any) -> bool:
    return not value.is_floating_point() if isinstance(value, torch.Tensor) else type(value) in (int, bool)


def inexact(function: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Returns whether arithmetic on integers leaves 64 bits, or divides integers that are no floats; ``None`` for
    operations that do neither.

    The test is of floats, and on the safe side.
    """
    name = getattr(function, "__name__", str(function)).removeprefix("_sym_")
    values = [value.value if isinstance(value, TensorScalar) else value for value in args]
    if not all(map(_is_integer, values)):
        return None
    floats = [value.double() if isinstance(value, torch.Tensor) else value for value in values]
    if name == "truediv":
        large = [torch.abs(value) > _EXACT for value in floats if isinstance(value, torch.Tensor)]
        return torch.stack(large).any()
    if name in ("add", "sub", "mul", "pow", "neg", "abs"):
        return torch.abs(_OF_FLOATS[name](*floats)) >= LARGEST
    return None
