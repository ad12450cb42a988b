"""Comparisons of floats that sympy decides algebraically (``v == v``, ``v - v == 0``), without NaN and rounding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.derived_numbers import LARGE

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.tracer import GraphTracer


aten = torch.ops.aten


def decided_by_algebra(tracer: GraphTracer, condition: Any) -> tuple[bool, list[Any]] | None:
    """Returns the algebraic result of a comparison and its floats; ``None`` for other conditions.

    Args:
        tracer: tracer of the capture.
        condition: any value.
    """
    known = compat.known_truth(condition) if type(condition) is torch.SymBool else None
    if known is None or not tracer.has_node(condition):
        return None
    floats = _floats_behind(tracer.node_of(condition))
    return (known, floats) if floats else None


def of_one_number(tracer: GraphTracer, condition: Any) -> bool:
    """Returns True if a number is compared with itself, or one from outside with infinity.

    The algebraic result is right then, if the number is finite.
    """
    left, *right = tracer.node_of(condition).args
    if right == [left]:
        return True
    sides = [left, *right]
    leaves = [side for side in sides if safe_isinstance(side, fx.Node) and side.op == "placeholder"]
    return len(leaves) == 1 and len(sides) == 2 and any(type(side) is float and math.isinf(side) for side in sides)


def known_before(floats: list[Any]) -> bool:
    """Returns True if none of the numbers is a result of the graph."""
    return not any(map(compat.is_unbacked, floats))


def rely_on_finite(floats: list[Any]) -> bool:
    """Guards outside numbers against NaN and infinity; returns False if one of them is not finite now."""
    return all(bool(number <= LARGE) and bool(number >= -LARGE) for number in floats)


def worked_out(tracer: GraphTracer, condition: Any) -> bool:
    """Evaluates the comparison in Python with the current numbers."""

    def value_of(item: Any) -> Any:
        if not safe_isinstance(item, fx.Node):
            return item
        if item.op == "placeholder":
            return compat.hint_of(item.meta["val"])
        return item.target(*map(value_of, item.args))  # type: ignore[operator]

    return bool(value_of(tracer.node_of(condition)))


def _floats_behind(node: fx.Node) -> list[Any]:
    found: list[Any] = []
    todo, seen = [node], {node}
    while todo:
        item = todo.pop()
        value = item.meta.get("val")
        leaf = item.op == "placeholder" or item.target is aten._local_scalar_dense.default
        if leaf and type(value) is torch.SymFloat:
            found.append(value)
        if not leaf:
            new = [arg for arg in item.all_input_nodes if arg not in seen]
            seen.update(new)
            todo += new
    return found
