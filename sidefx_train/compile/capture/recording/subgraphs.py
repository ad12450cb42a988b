"""Moves operations of a trace to a subgraph of their own: the branches of ``torch.cond``."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.fx_utils import written_args
from sidefx_train.compile.graph.view_chains import memory_of
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.tracer import GraphTracer


aten = torch.ops.aten
_INNER = tuple(getattr(torch.ops.higher_order, name) for name in ("cond", "map_impl", "scan", "while_loop"))
"""Operators with graphs of their own that a graph may contain."""

_OF_INTEGERS = frozenset(
    {operator.add, operator.sub, operator.mul, operator.neg, operator.eq, operator.ne, operator.lt, operator.le}
    | {operator.gt, operator.ge, aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default}
)
"""Functions of integers that never raise, and those that return sizes."""


class Region:
    """Everything that is recorded from now on.

    Attributes:
        what: name of the region in messages.
    """

    def __init__(self, tracer: GraphTracer, what: str) -> None:
        self.tracer = tracer
        self.what = what
        self._before = set(tracer.graph.nodes)

    def nodes(self) -> list[fx.Node]:
        """Returns the operations, in order; graph inputs that were added in between are not included.

        Neither are integers that are computed from integers and tensors outside: they are computed there.
        """
        found: dict[fx.Node, None] = {}
        for node in self.tracer.graph.nodes:
            if node in self._before or node.op == "placeholder":
                continue
            integer = safe_isinstance(node.meta.get("val"), (int, torch.SymInt, torch.SymBool))
            if not integer or node.target not in _OF_INTEGERS or not found.keys().isdisjoint(node.all_input_nodes):
                found[node] = None
        return list(found)

    def uses(self) -> list[fx.Node]:
        """Returns the nodes outside that the operations use.

        Raises:
            Unsupported: the operations cannot be a graph of their own.
        """
        inside = dict.fromkeys(self.nodes())
        found: dict[fx.Node, None] = {}
        for node in inside:
            self._check(node)
            for item in node.all_input_nodes:
                if item not in inside:
                    found[item] = None
        shared = {memory_of(item) for item in found}
        for node in inside:
            if any(memory_of(item) in shared for item in written_args(node)):
                self._refuse("writes in place to a tensor from outside")
        return list(found)

    def take(self, outputs: list[fx.Node], inputs: list[fx.Node]) -> fx.GraphModule:
        """Moves the operations to a graph with these inputs and a tuple of these outputs."""
        graph, root = fx.Graph(), torch.nn.Module()
        copies: dict[fx.Node, fx.Node] = {}
        for position, node in enumerate(inputs):
            copies[node] = graph.placeholder(f"operand_{position}")
            copies[node].meta["val"] = node.meta.get("val")
        inside = self.nodes()
        for node in inside:
            copies[node] = graph.node_copy(node, lambda item: copies[item])
            if node.op == "get_attr":  # a branch of a branch, or a constant
                setattr(root, str(node.target), self._held(node))
        taken = {memory_of(node) for node in inputs}
        results = []
        for node in outputs:
            result = copies[node]
            if memory_of(node) in taken:  # a branch must not return an alias
                result = graph.call_function(aten.clone.default, (result,))
                result.meta["val"] = node.meta.get("val")
            taken.add(memory_of(node))
            results.append(result)
        graph.output(tuple(results))
        for node in reversed(inside):
            self.tracer.graph.erase_node(node)
        return compat.graph_module(root, graph)

    def _held(self, node: fx.Node) -> Any:
        """Returns what a node names: the graph of a branch inside this one, or the tensor made of Python values."""
        found = getattr(self.tracer.tracer.root, str(node.target), None) if node.op == "get_attr" else None
        plain = safe_isinstance(found, torch.Tensor) and compat.mode_of(found) is None
        return found if plain or safe_isinstance(found, fx.GraphModule) else None

    def _check(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem or node.target in _INNER:
            return
        if self._held(node) is not None:
            return
        if node.op != "call_function" or not safe_isinstance(node.target, compat.OpOverload):
            self._refuse("computes a number, or makes a tensor of one")
        if compat.is_random(node.target):
            self._refuse("draws random numbers")
        values = value if safe_isinstance(value, (list, tuple)) else [value]
        if any(safe_isinstance(item, compat.SYMBOLS) for item in values):
            self._refuse("computes a number")

    def _refuse(self, reason: str) -> None:
        raise Unsupported("SFX111", f"{self.what} {reason}")
