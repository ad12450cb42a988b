"""Runs a captured graph with known contents in memory that its operators allocate and do not write.

What depends on that memory has no value that two runs could agree on: the rows of ``torch.empty(n)`` that a step has
not written yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from sidefx_train.compile.backend.verification.replaced_operators import Calling

aten = torch.ops.aten

_LEAVING = frozenset((aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided))


def leaves_memory(graph: fx.Graph) -> bool:
    """Returns True if an operator allocates memory that it does not write."""
    return any(_packet(node.target) in _LEAVING for node in graph.nodes)


class Filled(Calling):
    """Runs a graph with a number in all such memory.

    Args:
        module: the graph.
        number: what it has.
        functions: replacements of some of its operators.
    """

    def __init__(
        self, module: fx.GraphModule, number: float, functions: Mapping[Any, Callable[..., Any]] | None = None
    ) -> None:
        super().__init__(module, functions)
        self._number = number

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if _packet(target) in _LEAVING:
            with torch.no_grad():
                result.fill_(self._number)
        return result


def _packet(target: Any) -> Any:
    return getattr(target, "overloadpacket", None)
