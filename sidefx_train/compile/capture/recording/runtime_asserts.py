"""Adds runtime asserts to the graph for assumed conditions on tensors, or on numbers that only the graph knows."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.fx_utils import emit
from sidefx_train.compile.ops.runtime_assert import RUNTIME_ASSERT, assume_condition

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.tracer import GraphTracer


aten = torch.ops.aten

_COMPARISONS = {
    operator.lt: aten.lt.Tensor,
    operator.le: aten.le.Tensor,
    operator.gt: aten.gt.Tensor,
    operator.ge: aten.ge.Tensor,
    operator.eq: aten.eq.Tensor,
    operator.ne: aten.ne.Tensor,
}
_EXACT = 2**53
"""Integers up to this bound are exact as floats."""


def asked_of(tracer: GraphTracer, condition: Any) -> fx.Node | None:
    """Returns the node of the one-element tensor whose truth a condition is; ``None`` for other conditions."""
    if not safe_isinstance(condition, (compat.FakeTensor, torch.SymBool)) or not tracer.has_node(condition):
        return None
    node = tracer.node_of(condition)
    if type(condition) is compat.FakeTensor:
        return node if condition.numel() == 1 else None
    return node.args[0] if node.target is aten._local_scalar_dense.default else None  # type: ignore[return-value]


def grant(tracer: GraphTracer, condition: Any, holds: bool) -> bool:
    """Adds a runtime assert that a condition is true, or false; returns False if the graph cannot express it.

    Args:
        tracer: tracer of the capture.
        condition: a tensor of one element, or a comparison of a number of the graph.
        holds: the assumed truth.
    """
    if asked_of(tracer, condition) is None:
        known = safe_isinstance(condition, torch.SymBool) and tracer.has_node(condition)
        return known and _compared(tracer, condition, holds)
    if type(condition) is compat.FakeTensor:
        assume_condition(condition, holds)
    else:
        item = tracer.node_of(condition)
        with compat.no_recording(), tracer.graph.inserting_after(item):  # later nodes may write to the tensor
            emit(tracer.graph, tracer.fake_mode, RUNTIME_ASSERT, item.args[0], holds)
    return True


def grant_finite(tracer: GraphTracer, number: Any, *, infinite: bool, nan: bool) -> bool:
    """Asserts that a float of the graph is not infinite, not NaN, or neither; returns False for other numbers."""
    if type(number) is not torch.SymFloat or not compat.is_unbacked(number) or not tracer.has_node(number):
        return False
    with compat.no_recording():
        value = _Tensors(tracer, torch.float64).of(tracer.node_of(number))
        if value is None:
            return False
        for asked, op in ((infinite, aten.isinf.default), (nan, aten.isnan.default)):
            if asked:
                append(tracer, RUNTIME_ASSERT, append(tracer, op, value), False)
    return True


def grant_first(tracer: GraphTracer, condition: fx.Node, count: int) -> None:
    """Asserts that the first elements of a vector of truths are true, and no others."""
    with compat.no_recording():
        first = append(tracer, aten.slice.Tensor, condition, 0, 0, count)
        append(tracer, RUNTIME_ASSERT, append(tracer, aten.all.default, first), True)
        if count < condition.meta["val"].shape[0]:
            others = append(tracer, aten.slice.Tensor, condition, 0, count)
            append(tracer, RUNTIME_ASSERT, append(tracer, aten.any.default, others), False)


def _compared(tracer: GraphTracer, condition: torch.SymBool, holds: bool) -> bool:
    node = tracer.node_of(condition)
    op = _COMPARISONS.get(node.target)  # type: ignore[arg-type]
    values = [arg.meta["val"] if safe_isinstance(arg, fx.Node) else arg for arg in node.args]
    floats = [safe_isinstance(value, (float, torch.SymFloat)) for value in values]
    if op is None or len(values) != 2:
        return False
    if any(floats) and not all(one or _is_exact(value) for one, value in zip(floats, values, strict=True)):
        return False  # Python's comparison is exact
    with compat.no_recording():
        numbers = _Tensors(tracer, torch.float64 if any(floats) else torch.int64)
        operands = [numbers.of(arg) for arg in node.args]
        if None in operands:
            return False
        append(tracer, RUNTIME_ASSERT, append(tracer, op, *operands), holds)
    return True


def _is_exact(value: Any) -> bool:
    return type(value) is int and abs(value) <= _EXACT


_SIZES = (aten.sym_size.int, aten.sym_numel.default)


class _Tensors:
    """Converts unbacked numbers to 0-dim tensors of the graph: arithmetic replaces algebra.

    Args:
        tracer: tracer of the capture.
        dtype: dtype of all tensors.
    """

    def __init__(self, tracer: GraphTracer, dtype: torch.dtype) -> None:
        self._tracer = tracer
        self._dtype = dtype
        self._made: dict[fx.Node, fx.Node] = {}

    def of(self, number: Any) -> fx.Node | None:
        """Returns the node of a number; ``None`` if Python's result could differ or Python could raise."""
        if not safe_isinstance(number, fx.Node):
            return self._constant(number)
        if number not in self._made:
            made = self._from(number)
            if made is None:
                return None
            self._made[number] = made
        return self._made[number]

    def _constant(self, number: Any) -> fx.Node | None:
        if type(number) is not float and not _is_exact(number):
            return None
        return self._filled(number)

    def _filled(self, number: Any) -> fx.Node:
        place = {"dtype": self._dtype, "device": torch.device("cpu")}
        return append(self._tracer, aten.scalar_tensor.default, number, **place)

    def _from(self, node: fx.Node) -> fx.Node | None:
        if node.target is aten._local_scalar_dense.default:
            given = node.args[0].meta["val"]  # type: ignore[union-attr]
            if given.dtype.is_floating_point != self._dtype.is_floating_point:
                return None
            return copy_of_item(self._tracer, node, self._dtype)
        if node.op == "placeholder":
            kinds = torch.SymFloat if self._dtype.is_floating_point else torch.SymInt
            return self._filled(node) if safe_isinstance(node.meta["val"], kinds) else None
        if node.target in _SIZES:  # of a tensor whose size depends on data; below 2**53
            return self._filled(node)
        op = _ARITHMETIC.get(node.target)  # type: ignore[arg-type]
        if op is None and self._dtype.is_floating_point:
            op = _OF_FLOATS.get(node.target)  # type: ignore[arg-type]
        operands = [self.of(arg) for arg in node.args] if op is not None else [None]
        if op is None and node.target in _OF_INTEGERS and not self._dtype.is_floating_point:
            (op, kwargs), divisor = _OF_INTEGERS[node.target], node.args[1]  # type: ignore[index]
            left = self.of(node.args[0]) if type(divisor) is int and divisor else None
            return None if left is None else append(self._tracer, op, left, divisor, **kwargs)
        return None if None in operands else append(self._tracer, op, *operands)


_ARITHMETIC = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.neg: aten.neg.default,
    operator.abs: aten.abs.default,
    torch.sym_float: aten.alias.default,
}
"""Operations that never raise and whose result in double precision is Python's."""
_OF_INTEGERS: dict[Any, tuple[Any, dict[str, Any]]] = {
    operator.floordiv: (aten.div.Scalar_mode, {"rounding_mode": "floor"}),
    operator.mod: (aten.remainder.Scalar, {}),
}
"""Those with integers, by a constant that is not zero."""
_OF_FLOATS = {operator.truediv: aten.div.Tensor, compat.SYMBOLIC_MATH[math.sqrt]: aten.sqrt.default}
"""Those of which an earlier condition says that they do not raise."""


def copy_of_item(tracer: GraphTracer, item: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Returns a copy of the tensor that an ``item()`` reads, made there: later nodes may write to the tensor."""
    with tracer.graph.inserting_after(item):
        place = {"dtype": dtype, "device": torch.device("cpu")}
        return emit(tracer.graph, tracer.fake_mode, aten._to_copy.default, item.args[0], **place)


def append(tracer: GraphTracer, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Adds an operation at the end of the graph."""
    with tracer.graph.inserting_after(tracer.last_node()):
        return emit(tracer.graph, tracer.fake_mode, op, *args, **kwargs)
