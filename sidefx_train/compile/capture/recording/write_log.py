"""Records which operations of the graph wrote to which storage."""

from __future__ import annotations

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.fx_utils import written_args


class WriteLog:
    """Writing operations of the graph, by storage.

    Version counters of fake tensors are not enough: multi-tensor operations do not increment them.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._seen: fx.Node | None = None
        self._found: dict[int, list[fx.Node]] = {}

    def to(self, tensor: torch.Tensor) -> list[fx.Node]:
        """Returns the operations recorded so far that wrote to a tensor's storage, in order."""
        node = next(iter(self._graph.nodes), None) if self._seen is None else self._seen.next
        while node is not None and node.op != "root":
            if node.op == "call_function":
                for place in {_storage(held) for held in _written(node)}:
                    self._found.setdefault(place, []).append(node)
            self._seen, node = node, node.next
        return self._found.get(_storage(tensor), []) + self._found.get(_ANY, [])


_ANY = -1
"""Unknown storage: of a wrapped tensor of ``torch.func``."""


def _storage(tensor: torch.Tensor) -> int:
    try:
        return compat.storage_id(tensor) if tensor.layout is torch.strided else _ANY
    except NotImplementedError:
        return _ANY


def _written(node: fx.Node) -> list[torch.Tensor]:
    """Returns the fake tensors that an operation writes to."""
    held = [item.meta.get("val") for item in written_args(node)]
    return [value for value in held if isinstance(value, torch.Tensor)]
