"""Adds runtime asserts for what eager's kernels require of sizes that only the graph knows.

The fake kernels note each requirement in the shape environment (``torch.zeros(n)`` that ``n`` is not negative,
``x.narrow(1, 0, n)`` that it is at most the size of ``x``). The captured operations need not check it: ``narrow`` is
recorded as a slice, and Inductor's code does not raise where eager's kernel does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.runtime_asserts import append, copy_of_item
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.ops.runtime_assert import RUNTIME_ASSERT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.tracer import GraphTracer

aten = torch.ops.aten


def assert_sizes(tracer: GraphTracer) -> bool:
    """Asserts the noted requirements; returns False if the graph cannot express one of them."""
    conditions = compat.deferred_conditions(tracer.fake_mode.shape_env)
    if not conditions:
        return True
    numbers = _Numbers(tracer)
    with compat.no_recording():
        for condition in conditions:
            if not any(map(numbers.knows, condition.free_symbols)):
                continue  # of memory offsets of a result: true of what the kernel makes
            try:
                holds = compat.interpret_symbolic(numbers, numbers.values(condition), condition)
            except (NotImplementedError, KeyError):  # a KeyError for a function that the interpreter does not know
                return False
            numbers.append(RUNTIME_ASSERT, holds, True)
    return True


_OPERATORS = {
    "add": aten.add.Tensor,
    "mul": aten.mul.Tensor,
    "maximum": aten.maximum.default,
    "minimum": aten.minimum.default,
    "eq": aten.eq.Tensor,
    "ne": aten.ne.Tensor,
    "lt": aten.lt.Tensor,
    "le": aten.le.Tensor,
    "gt": aten.gt.Tensor,
    "ge": aten.ge.Tensor,
    "and_": aten.logical_and.default,
    "or_": aten.logical_or.default,
    "not_": aten.logical_not.default,
}
"""By the name of the method that torch's interpreter of symbolic expressions calls."""


class _Unknown(NotImplementedError, AttributeError):
    """The graph has no such operation on integers."""


class _Numbers:
    """Computes symbolic integers and conditions as 0-dim tensors of the graph.

    Torch's interpreter of symbolic expressions calls its methods. Others than those of integers raise.

    Args:
        tracer: tracer of the capture.
    """

    def __init__(self, tracer: GraphTracer) -> None:
        self._tracer = tracer
        self._nodes: dict[Any, fx.Node] = {}  # by symbol
        self._tensors: dict[Any, fx.Node] = {}
        self._sizes: dict[Any, tuple[fx.Node, int]] = {}
        for node in tracer.graph.nodes:
            value = node.meta.get("val")
            if safe_isinstance(value, torch.SymInt):
                self._nodes.setdefault(compat.symbol_of_input(value), node)
            elif safe_isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    if safe_isinstance(size, torch.SymInt):
                        self._sizes.setdefault(compat.symbol_of_input(size), (node, dim))

    def knows(self, symbol: Any) -> bool:
        """Returns True for a number of the graph, or a size of one of its tensors."""
        return symbol in self._nodes or symbol in self._sizes

    def __getattr__(self, name: str) -> Any:
        if name not in _OPERATORS:
            raise _Unknown(name)
        return partial(self.append, _OPERATORS[name])

    def values(self, condition: Any) -> dict[Any, fx.Node]:
        """Returns the 0-dim integer tensor of each symbol of a condition.

        Raises:
            NotImplementedError: the graph does not compute a symbol.
        """
        return {symbol: self._tensor(symbol) for symbol in condition.free_symbols}

    def append(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return append(self._tracer, op, *args, **kwargs)

    def _tensor(self, symbol: Any) -> fx.Node:
        if not self.knows(symbol):
            raise NotImplementedError(str(symbol))
        node = self._nodes.get(symbol) or self.append(aten.sym_size.int, *self._sizes[symbol])
        number = node.meta["val"]
        if not safe_isinstance(number, torch.SymInt) or not compat.symbol_of(number).free_symbols:
            raise NotImplementedError(f"{symbol} was replaced by {number}")  # later stages take it for a constant
        if symbol not in self._tensors:
            self._tensors[symbol] = self._of(node)
        return self._tensors[symbol]

    def _of(self, node: fx.Node) -> fx.Node:
        if node.target is aten._local_scalar_dense.default:
            return copy_of_item(self._tracer, node, torch.int64)
        return self.append(aten.scalar_tensor.default, node, dtype=torch.int64, device=torch.device("cpu"))

    def constant(self, value: Any, dtype: torch.dtype) -> fx.Node:
        if dtype not in (torch.int64, torch.bool) or abs(value) >= 2**63:
            raise NotImplementedError(str(value))
        value = bool(value) if dtype is torch.bool else int(value)
        return self.append(aten.scalar_tensor.default, value, dtype=dtype, device=torch.device("cpu"))

    def floordiv(self, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.append(aten.div.Tensor_mode, x, self._divisor(y), rounding_mode="floor")

    def mod(self, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.append(aten.remainder.Tensor, x, self._divisor(y))

    python_mod = mod

    def _divisor(self, y: fx.Node) -> fx.Node:
        """Replaces 0 by 1: another condition says that the divisor is not 0, and a kernel would raise."""
        return self.append(aten.where.ScalarSelf, self.append(aten.eq.Scalar, y, 0), 1, y)
