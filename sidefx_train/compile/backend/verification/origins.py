"""Finds the operations that compute a captured graph's outputs and written inputs, for messages."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.verification.comparison import Pair
from sidefx_train.compile.graph.alias_analysis import Aliases
from sidefx_train.compile.graph.artifacts import DERIVED, LINE, TracedGraph

aten = torch.ops.aten


class Origins:
    """The nodes that compute a graph's outputs and the new values of its inputs.

    Args:
        traced: the graph.
    """

    def __init__(self, traced: TracedGraph) -> None:
        self._inputs = traced.inputs
        nodes = list(traced.module.graph.nodes)
        self._order = {node: i for i, node in enumerate(nodes)}
        self._outputs: Any = nodes[-1].args[0]
        aliases = Aliases(traced.module.graph)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        last = {root: node for node in nodes if node.op == "call_function" for root in aliases.writes(node)}
        self._writers = [last.get(next(iter(aliases.roots[node]), node)) for node in placeholders]

    def in_words(self, wrong: list[tuple[Pair, str]]) -> str:
        """Describes the first differing value in graph order, with the operation that computes it, and counts the
        others."""
        first, what = min(wrong, key=lambda item: self._order.get(self.node(item[0]), len(self._order)))
        more = f"; {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
        return f"{self._name(first)} {what}{more}"

    def node(self, pair: Pair) -> fx.Node | None:
        """Returns the node of a value: of an output, before its views, or of what is written into an input."""
        if pair.what == "output":
            found = self._outputs[pair.index]
        else:
            found = self._writers[pair.index]
            if found is not None and found.target is aten.copy_.default and _computed(found.args[1]) is not None:
                found = found.args[1]
        return _computed(found)

    def _name(self, pair: Pair) -> str:
        node = self.node(pair)
        computed = f", computed by {node.target}{_where(node)}," if node is not None else ""
        if pair.what == "input":
            return f"input {pair.index} ({self._inputs[pair.index].source}){computed}"
        return f"output {pair.index}{computed}"


def _computed(value: Any) -> fx.Node | None:
    """Returns the call that computed a value; ``None`` for inputs and constants."""
    while isinstance(value, fx.Node) and value.op == "call_function" and value.args:
        view = isinstance(value.target, compat.OpOverload) and value.target.is_view
        if value.target is not operator.getitem and not view:
            return value
        value = value.args[0]
    return value if isinstance(value, fx.Node) and value.op == "call_function" else None


def _where(node: fx.Node) -> str:
    """Returns the program's line of a node."""
    line = node.meta.get(LINE)
    if line is None:
        return ""
    return f" in the derivative of {line}" if DERIVED in node.meta else f" at {line}"
