"""Number arguments of operators: which are C++ doubles, and how constants that stand for numbers are replaced."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import fx

_DOUBLES = frozenset({"float", "Optional[float]"})


@lru_cache(maxsize=1024)
def takes_double(op: Any) -> bool:
    """Returns True if an argument of an operator is a C++ ``double``, which cannot be symbolic."""
    return any(str(argument.type) in _DOUBLES for argument in op._schema.arguments)


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
