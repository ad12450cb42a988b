"""Tensors that depend on no graph input: their values are known during the capture."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.fx_utils import written_args

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.interfaces import GraphRecorder


_MOST_NODES = 64
_MOST_ELEMENTS = 1 << 20
_not_constant: weakref.WeakSet[fx.Node] = weakref.WeakSet()
"""Nodes that are known to be no constants, nor those that they lead to: what leads to a node does not change."""


def constant_value(tracer: GraphRecorder, value: torch.Tensor) -> torch.Tensor | None:
    """Returns the contents that a tensor has now, if it is computed from constants only (``arange``, comparisons of
    such...), else ``None``.

    The few nodes that compute it are run, with those that write to its memory. Nodes that draw random numbers, or are
    large, are not constants.
    """
    if not tracer.has_node(value):
        return None
    wanted = tracer.node_of(value)
    nodes = _with_writers(tracer, wanted)
    return None if nodes is None else _computed(tracer, wanted, nodes)


def constant_of(tracer: GraphRecorder, node: fx.Node) -> torch.Tensor | None:
    """Like :func:`constant_value`, for a node of the graph that nothing has written to."""
    nodes = _ancestors([node])
    if nodes is None or _writers(tracer.graph, nodes):
        return None
    return _computed(tracer, node, nodes)


def may_be_constant(node: fx.Node) -> bool:
    """Returns True if only constants lead to a node; something may have written to it."""
    return _ancestors([node]) is not None


def _computed(tracer: GraphRecorder, wanted: fx.Node, nodes: set[fx.Node]) -> torch.Tensor | None:
    """Returns what ``wanted`` is after ``nodes`` have run in the order of the graph."""
    results: dict[fx.Node, Any] = {}
    with compat.real_world(), torch.no_grad():
        for node in tracer.graph.nodes:
            if node not in nodes:
                continue
            if node.op == "get_attr":
                results[node] = getattr(tracer.tracer.root, str(node.target)).clone()  # others may write to it
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: results[n])
            results[node] = node.target(*args, **kwargs)
    found = results[wanted]
    return found if safe_isinstance(found, torch.Tensor) else None


def _with_writers(tracer: GraphRecorder, node: fx.Node) -> set[fx.Node] | None:
    """Returns the nodes that compute a node's contents now, with the writes to their memory; ``None`` if one is no
    constant."""
    wanted = {node}
    while True:
        nodes = _ancestors(wanted)
        if nodes is None:
            return None
        more = _writers(tracer.graph, nodes) - nodes
        if not more:
            return nodes
        wanted |= more


def _ancestors(wanted: Iterable[fx.Node]) -> set[fx.Node] | None:
    """Returns ``wanted`` with all nodes that lead there; ``None`` if these are many, or one is no constant."""
    seen: set[fx.Node] = set()
    first = list(wanted)
    todo = list(first)
    while todo:
        item = todo.pop()
        if item in seen:
            continue
        if len(seen) >= _MOST_NODES or item in _not_constant or not _is_constant(item):
            if len(first) == 1:
                _not_constant.add(first[0])
            return None
        seen.add(item)
        todo.extend(item.all_input_nodes)
    return seen


def _is_constant(node: fx.Node) -> bool:
    """Returns True if a node computes a constant from constants."""
    if node.op not in ("call_function", "get_attr"):
        return False
    if node.op == "call_function" and compat.is_random(node.target):
        return False
    held = node.meta.get("val")
    if not safe_isinstance(held, torch.Tensor):
        return True
    count = held.numel()
    return type(count) is int and count <= _MOST_ELEMENTS


def _writers(graph: fx.Graph, nodes: set[fx.Node]) -> set[fx.Node]:
    """Returns the operations that write to the storage of one of ``nodes``, also through a view."""
    made = set[int]().union(*map(_memory, nodes))
    return {
        node
        for node in graph.nodes
        if any(item in nodes or not made.isdisjoint(_memory(item)) for item in written_args(node))
    }


def _memory(node: fx.Node) -> set[int]:
    """Returns the storages of a node's results."""
    found = pytree.tree_leaves(node.meta.get("val"))
    return {compat.storage_id(value) for value in found if safe_isinstance(value, torch.Tensor)}
