"""Bounds of numbers that only the graph knows: they decide whether arithmetic with these can raise.

``norm.item() ** 2`` of a ``float32`` tensor cannot overflow, and ``norm.item() + 1e-6`` is not zero. Every number may
also be NaN, with which no operation here raises.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.tracer import GraphTracer

aten = torch.ops.aten

BOUNDS = "bounds"
"""Key in a node's ``meta``: the bounds of the number that its tensor holds."""
MOST = torch.finfo(torch.float64).max
"""Bound of integers of which none is known, too."""
_MOST_EXACT = 2**53
"""Integers up to this bound are exact as floats."""

_NOT_NEGATIVE = frozenset(
    (aten.linalg_vector_norm, aten.norm, aten.abs, aten.exp, aten.sqrt, aten.relu, aten.mse_loss, aten.l1_loss)
    + (aten.smooth_l1_loss, aten.huber_loss, aten.var, aten.std, aten.sigmoid)
)
"""Operators whose results are at least zero, or NaN."""

_OF_ITEMS = frozenset({aten.mean, aten.sum, aten.amax, aten.amin, aten.max, aten.min, aten.detach, aten.alias})
"""Operators whose results are at least zero if those of their input are."""


_COUNTS = frozenset({aten.sum, aten.count_nonzero, aten.argmax, aten.argmin})
"""Operators whose integers are numbers of elements, of a sum if they are truth values, or indices."""


class Bounds(NamedTuple):
    """Where a number lies if it is not NaN.

    Attributes:
        low: lower bound, perhaps infinite.
        high: upper bound, perhaps infinite.
        largest: bound of the absolute value if it is finite.
    """

    low: float
    high: float
    largest: float


_UNKNOWN = Bounds(-math.inf, math.inf, MOST)


def decided(tracer: GraphTracer, condition: Any) -> bool | None:
    """Returns the truth of a comparison of numbers that holds whatever the graph computes; ``None`` if there is none.

    NaN is taken for a number within its bounds: no operation raises an error for it.
    """
    if not tracer.has_node(condition):
        return None
    node = tracer.node_of(condition)
    asked = _DECIDED.get(node.target)  # type: ignore[arg-type]
    if asked is None or len(node.args) != 2:
        return None
    known: dict[fx.Node, Bounds] = {}
    return asked(*(_of(side, known) for side in node.args))


def power_overflows(tracer: GraphTracer, base: Any, exponent: Any) -> bool:
    """Returns True if a power of a number of the graph may be too large for a float: Python raises an error then."""
    if type(exponent) not in (int, float) or exponent < 0 or not tracer.has_node(base):
        return True
    largest = _of(tracer.node_of(base), {}).largest
    return largest > 1 and math.log2(largest) * exponent >= 1023


def is_of_integers(tracer: GraphTracer, number: Any) -> bool:
    """Returns True for a number that is computed from integers of the graph alone, and is neither infinite nor NaN."""
    if not tracer.has_node(number):
        return False
    asked, seen = [tracer.node_of(number)], set()
    while asked:
        node = asked.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target is aten._local_scalar_dense.default:
            if node.args[0].meta["val"].dtype.is_floating_point:  # type: ignore[union-attr]
                return False
        elif node.target in _RULES:
            asked += node.all_input_nodes
        else:
            return False
    return all(map(math.isfinite, _of(tracer.node_of(number), {})))


def of(tracer: GraphTracer, number: Any) -> Bounds:
    """Returns the bounds of a number."""
    return _of(tracer.node_of(number) if tracer.has_node(number) else number, {})


def of_node(node: fx.Node) -> Bounds:
    """Returns the bounds of the number that a node computes."""
    return _of(node, {})


def _of(number: Any, known: dict[fx.Node, Bounds]) -> Bounds:
    if not safe_isinstance(number, fx.Node):
        return _of_constant(number)
    if number not in known:
        known[number] = _UNKNOWN if number.op == "placeholder" else _computed(number, known)
    return known[number]


def _of_constant(number: Any) -> Bounds:
    if type(number) not in (int, float) or (type(number) is int and abs(number) > _MOST_EXACT):
        return _UNKNOWN
    value = float(number)
    return _UNKNOWN if math.isnan(value) else Bounds(value, value, abs(value) if math.isfinite(value) else 0.0)


def _computed(node: fx.Node, known: dict[fx.Node, Bounds]) -> Bounds:
    if node.target is aten._local_scalar_dense.default:
        return _of_item(node.args[0])  # type: ignore[arg-type]
    rule = _RULES.get(node.target)  # type: ignore[arg-type]
    return _UNKNOWN if rule is None or node.kwargs else rule(*(_of(arg, known) for arg in node.args))


def _of_item(tensor: fx.Node) -> Bounds:
    if BOUNDS in tensor.meta:
        return tensor.meta[BOUNDS]  # type: ignore[no-any-return]
    dtype = tensor.meta["val"].dtype
    if dtype.is_floating_point:
        return Bounds(0.0 if _is_not_negative(tensor) else -math.inf, math.inf, float(torch.finfo(dtype).max))
    if dtype is torch.bool:
        return Bounds(0.0, 1.0, 1.0)
    if dtype.is_complex:
        return _UNKNOWN
    most = _most_counted(tensor)
    if most is not None:
        return Bounds(0.0, most, most)
    low, high = float(torch.iinfo(dtype).min), float(torch.iinfo(dtype).max)
    return Bounds(low, high, max(-low, high))


def _most_counted(tensor: fx.Node) -> float | None:
    """Returns an upper bound of what a tensor holds if it is a number of elements, or the index of one, and nothing
    writes to it."""
    packet = getattr(tensor.target, "overloadpacket", None)
    if packet not in _COUNTS or any(_writes(user) for user in tensor.users):
        return None
    counted = tensor.all_input_nodes[0].meta["val"]
    if packet is aten.sum and counted.dtype is not torch.bool:
        return None
    return float(_MOST_EXACT if any(type(size) is not int for size in counted.shape) else counted.numel())


def _is_not_negative(node: fx.Node) -> bool:
    """Returns True if no element of a tensor is negative, and nothing writes to it. Integers overflow."""
    packet, value = getattr(node.target, "overloadpacket", None), node.meta["val"]
    plain = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    if not plain or any(_writes(user) for user in node.users):
        return False
    if packet in _NOT_NEGATIVE:
        return True
    if packet is aten.pow and type(node.args[1]) is int and node.args[1] % 2 == 0:
        return True
    inputs = node.all_input_nodes
    return packet in _OF_ITEMS and len(inputs) == 1 and _is_not_negative(inputs[0])


def _writes(user: fx.Node) -> bool:
    """Returns True for an operator that writes to a tensor, or returns a view through which one could."""
    schema = getattr(user.target, "_schema", None)
    if schema is None:
        return False
    if any(argument.alias_info is not None for argument in schema.arguments):
        return user.target is not aten.detach.default or any(map(_writes, user.users))
    return False


def _sum(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(_least(a.low + b.low), _most(a.high + b.high), min(a.largest + b.largest, MOST))


def _difference(a: Bounds, b: Bounds) -> Bounds:
    return _sum(a, _negative(b))


def _negative(a: Bounds) -> Bounds:
    return Bounds(-a.high, -a.low, a.largest)


def _product(a: Bounds, b: Bounds) -> Bounds:
    lowest = _least(a.low * b.low, 0.0)
    return Bounds(*_extremes(a, b, operator.mul, lowest), min(a.largest * b.largest, MOST))


def _quotient(a: Bounds, b: Bounds) -> Bounds:
    if b.low <= 0:
        return _UNKNOWN
    return Bounds(*_extremes(a, b, operator.truediv, 0.0), min(max(a.largest / b.low, a.largest), MOST))


def _extremes(a: Bounds, b: Bounds, function: Callable[[float, float], float], lowest: float) -> tuple[float, float]:
    """Returns the least and the greatest result; ``lowest`` is a lower bound if no operand is negative."""
    if not all(map(math.isfinite, (*a[:2], *b[:2]))):
        return (lowest if a.low >= 0 and b.low >= 0 else -math.inf), math.inf
    found = [function(x, y) for x in a[:2] for y in b[:2]]
    return min(found), max(found)


def _floor_quotient(a: Bounds, b: Bounds) -> Bounds:
    low, high, largest = _quotient(a, b)
    return Bounds(low - 1, high, min(largest + 1, MOST))


def _remainder(a: Bounds, b: Bounds) -> Bounds:
    if b.low > 0:
        return Bounds(0.0, b.high, b.largest)
    return Bounds(b.low, 0.0, b.largest) if b.high < 0 else Bounds(-math.inf, math.inf, b.largest)


def _common_bits(a: Bounds, b: Bounds) -> Bounds:
    least = min((each.high for each in (a, b) if each.low >= 0), default=math.inf)
    return Bounds(0.0, least, least) if math.isfinite(least) else _UNKNOWN


def _absolute(a: Bounds) -> Bounds:
    return Bounds(max(a.low, -a.high, 0.0), max(a.high, -a.low), a.largest)


def _power(a: Bounds, b: Bounds) -> Bounds:
    exponent = b.low
    if b.low != b.high or exponent < 0 or not math.isfinite(exponent):
        return _UNKNOWN
    largest = MOST if a.largest > 1 and math.log2(a.largest) * exponent >= 1023 else max(a.largest, 1.0) ** exponent
    even = exponent % 2 == 0
    return Bounds(0.0 if even or a.low >= 0 else -math.inf, math.inf, largest)


def _root(a: Bounds) -> Bounds:
    return Bounds(0.0, math.inf, max(math.sqrt(a.largest), 1.0))


def _same(a: Bounds) -> Bounds:
    return a


def _larger(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(max(a.low, b.low), max(a.high, b.high), max(a.largest, b.largest))


def _smaller(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(min(a.low, b.low), min(a.high, b.high), max(a.largest, b.largest))


def _least(value: float, unknown: float = -math.inf) -> float:
    return unknown if math.isnan(value) else value


def _most(value: float) -> float:
    return math.inf if math.isnan(value) else value


_RULES: dict[Any, Callable[..., Bounds]] = {
    operator.add: _sum,
    operator.sub: _difference,
    operator.mul: _product,
    operator.truediv: _quotient,
    operator.floordiv: _floor_quotient,
    operator.mod: _remainder,
    operator.and_: _common_bits,
    operator.neg: _negative,
    operator.abs: _absolute,
    operator.pow: _power,
    torch.sym_float: _same,
    torch.sym_max: _larger,
    torch.sym_min: _smaller,
    compat.SYMBOLIC_MATH[math.sqrt]: _root,
}


def _equal(a: Bounds, b: Bounds) -> bool | None:
    return False if a.low > b.high or a.high < b.low else None


def _less(a: Bounds, b: Bounds) -> bool | None:
    return True if a.high < b.low else False if a.low >= b.high else None


def _at_most(a: Bounds, b: Bounds) -> bool | None:
    return True if a.high <= b.low else False if a.low > b.high else None


_DECIDED: dict[Any, Callable[[Bounds, Bounds], bool | None]] = {
    operator.eq: _equal,
    operator.lt: _less,
    operator.le: _at_most,
    operator.gt: lambda a, b: _less(b, a),
    operator.ge: lambda a, b: _at_most(b, a),
}
