"""Comparisons of floats that algebra decides alone (``v == v``, ``v - v == 0``), past NaN, infinity and rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.tracer import GraphTracer


aten = torch.ops.aten

_LARGE = 1e308


def decided_by_algebra(tracer: GraphTracer, condition: Any) -> tuple[bool, list[Any]] | None:
    """What algebra makes of a comparison whatever its floats are, and those floats; ``None`` for other conditions.

    Args:
        tracer: of the capture.
        condition: any value.
    """
    known = compat.known_truth(condition) if type(condition) is torch.SymBool else None
    if known is None or not tracer.has_node(condition):
        return None
    floats = _floats_behind(tracer.node_of(condition))
    return (known, floats) if floats else None


def of_one_number(tracer: GraphTracer, condition: Any) -> bool:
    """True where a number is compared with itself: algebra is right for all but NaN."""
    left, *right = tracer.node_of(condition).args
    return right == [left]


def known_before(floats: list[Any]) -> bool:
    """True if none of the numbers comes out of the graph."""
    return not any(map(compat.is_unbacked, floats))


def rely_on_finite(floats: list[Any]) -> bool:
    """Guards numbers from outside against NaN and infinity; false if they are as large as that now."""
    return all(bool(number <= _LARGE) and bool(number >= -_LARGE) for number in floats)


def worked_out(tracer: GraphTracer, condition: Any) -> bool:
    """What Python makes of the comparison, of the numbers as they are now."""

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
