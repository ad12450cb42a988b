"""Number arguments of operators: which are C++ doubles, and how constants that stand for numbers are replaced."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import fx

_DOUBLES = frozenset({"float", "Optional[float]"})
_SCALARS = frozenset({"number", "Optional[number]"})


def is_double(argument: Any) -> bool:
    """Returns True if an argument of an operator's schema is a C++ ``double``."""
    return str(argument.type) in _DOUBLES


def is_scalar(argument: Any) -> bool:
    """Returns True if an argument of an operator's schema is a number of any class."""
    return str(argument.type) in _SCALARS


@lru_cache(maxsize=1024)
def takes_double(op: Any) -> bool:
    """Returns True if an argument of an operator is a C++ ``double``, which cannot be symbolic."""
    return any(map(is_double, op._schema.arguments))


def takes_size(node: fx.Node, number: fx.Node) -> bool:
    """Returns True if a number is a size, an index or the like among the arguments of an operator's node."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    for position, argument in enumerate(arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        is_size = "int" in str(argument.real_type) or node.target.overloadpacket is torch.ops.aten.arange  # type: ignore[union-attr]
        if is_size and number in (given if isinstance(given, (list, tuple)) else (given,)):
            return True
    return False


def replace_constants(node: fx.Node, instead: dict[float, fx.Node]) -> set[float]:
    """Replaces floats among a node's arguments by nodes; returns those that it has replaced."""
    found = set()

    def replaced(value: Any) -> Any:
        if type(value) is float and value in instead:
            found.add(value)
            return instead[value]
        return value

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), replaced)  # type: ignore[misc]
    if found:
        node.args, node.kwargs = args, kwargs
    return found
