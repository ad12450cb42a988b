"""Python expressions of the numbers of a graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from sidefx_train.compile.common.source_literals import literal

INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lshift: "<<",
    operator.rshift: ">>",
}
"""Operators of two numbers."""
PREFIX = {operator.neg: "-", operator.pos: "+", operator.not_: "not ", operator.invert: "~"}
"""Operators of one number."""


def render_number(node: fx.Node, names: Mapping[fx.Node, str], functions: Mapping[Any, str]) -> str | None:
    """Returns a Python expression of a number node over named operands, or ``None`` for an unknown operation.

    Args:
        node: the node.
        names: the variables of its operands.
        functions: expressions of the functions that it may call.
    """
    operands: list[str] = []
    for arg in node.args:
        text = names[arg] if isinstance(arg, fx.Node) else literal(arg)
        if text is None:
            return None
        operands.append(text)
    if node.target in INFIX:
        return f"{operands[0]} {INFIX[node.target]} {operands[1]}"
    if node.target in PREFIX:
        return f"{PREFIX[node.target]}{operands[0]}"
    if node.target in functions:
        return f"{functions[node.target]}({', '.join(operands)})"
    return None
