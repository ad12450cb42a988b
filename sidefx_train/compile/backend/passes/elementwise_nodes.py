"""Which nodes of a graph are operations of an elementwise expression (``gpu/multi_tensor/expression.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.gpu.multi_tensor.expression import DTYPES, OPERATIONS, literal_of

aten = torch.ops.aten

Arguments = tuple[Any, ...]
"""Of an operation: nodes, and literals of numbers."""

_CASTS = (
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    torch.ops.prims.convert_element_type.default,
)
_RENAMED = {
    "clamp_min": "maximum",
    "clamp_max": "minimum",
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_not": "logical_not",
}
_FACTORS = {"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value"}
"""Operators with a sum, and the name of the factor of what is added."""

_POWERS = {2: "square", 0.5: "sqrt", 1: "cast", -1: "reciprocal"}
"""Exponents for which torch's kernels compute no power."""


def operation_of(node: fx.Node) -> tuple[str, Arguments] | None:
    """Returns the name of a node's operation and its arguments; ``None`` if an expression cannot contain it."""
    if not isinstance(node.target, compat.OpOverload) or node.meta["val"].dtype not in DTYPES:
        return None
    if node.target in _CASTS:
        return "cast", _literals(node.args[:1])
    if node.target is aten.copy.default:
        return "cast", _literals(node.args[1:2])
    if node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype"}:
        return "cast", _literals(node.args)
    name = node.target._schema.name.partition("::")[2]
    arguments = list(node.args)
    if name in _FACTORS:
        return _sum(name, arguments, node)
    if name == "pow" and isinstance(arguments[1], (int, float)) and arguments[1] in _POWERS:
        name = _POWERS[arguments.pop()]  # type: ignore[index, arg-type]
    name = _RENAMED.get(name, name)
    if name not in OPERATIONS or node.kwargs or not all(map(_is_operand, arguments)):
        return None
    if node.meta["val"].dtype == torch.bool and name != "where" and not OPERATIONS[name].compares:
        return None
    if name.startswith("logical") and any(_dtype(each) != torch.bool for each in arguments):
        return None
    return name, _literals(arguments)


def literal_constant(node: fx.Node) -> str | None:
    """Returns the literal of a tensor whose elements are one number; ``None`` for any other."""
    if node.target is aten.full.default and isinstance(node.args[1], (bool, int, float)):
        return literal_of(node.args[1])
    return None


def _sum(name: str, arguments: list[Any], node: fx.Node) -> tuple[str, Arguments] | None:
    factor = node.kwargs.get(_FACTORS[name], 1)
    if set(node.kwargs) - {_FACTORS[name]} or not isinstance(factor, (int, float)):
        return None
    if not all(map(_is_operand, arguments)) or node.meta["val"].dtype == torch.bool:
        return None
    if factor == 1:
        return name, _literals(arguments)
    if not node.meta["val"].dtype.is_floating_point:
        return None
    scaled = "add_scaled" if name == "sub" else f"{name}_scaled"
    return scaled, (*_literals(arguments), literal_of(-factor if name == "sub" else factor))


def _is_operand(argument: Any) -> bool:
    if isinstance(argument, fx.Node):
        return isinstance(argument.meta.get("val"), torch.Tensor) and argument.meta["val"].dtype in DTYPES
    return isinstance(argument, (bool, int, float))


def _dtype(argument: Any) -> torch.dtype | None:
    return argument.meta["val"].dtype if isinstance(argument, fx.Node) else None


def _literals(arguments: Any) -> Arguments:
    return tuple(each if isinstance(each, fx.Node) else literal_of(each) for each in arguments)


def value_of(node: Any) -> Any:
    """Returns the fake value of a node."""
    return node.meta.get("val")


def is_tensor(node: Any) -> bool:
    """Returns True for a node whose value an expression can have: a strided tensor of a dtype that it computes with."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dtype in DTYPES
