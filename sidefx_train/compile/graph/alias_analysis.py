"""Alias analysis: which nodes of a captured graph share storage, from operator schemas.

A graph recorded by the dispatcher contains views and in-place operations. Every pass that moves or removes a node uses
this module to find the storages that it reads and writes. A *root* is the node that created a storage: a placeholder, a
constant, or the operation that allocated it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.fx_utils import node_args, schema_args, written_args
from sidefx_train.compile.graph.strided_layout import extent


class Aliases:
    """Storage roots of every tensor node of a graph.

    Attributes:
        roots: nodes whose storage a node's value may share (a tuple-valued node: any of its items).
        overlapping: placeholders whose memory overlaps; the first represents the others' storage.
        same: for a node that returns the tensor object of one of its arguments (``add_``, ``t_``), that argument's own
            representative; otherwise the node itself.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.roots: dict[fx.Node, frozenset[fx.Node]] = {}
        self.same: dict[fx.Node, fx.Node] = {}
        self.overlapping = overlapping([node for node in graph.nodes if node.op == "placeholder"])
        first = {node: group[0] for group in self.overlapping for node in group}
        for node in graph.nodes:
            self.roots[node] = self._roots_of(node) if node not in first else frozenset((first[node],))
            self.same[node] = self._same_as(node)

    def reads(self, node: fx.Node) -> frozenset[fx.Node]:
        """Returns the roots of all inputs of the node."""
        return (
            frozenset().union(*(self.roots[a] for a in node.all_input_nodes)) if node.all_input_nodes else frozenset()
        )

    def writes(self, node: fx.Node) -> frozenset[fx.Node]:
        """Returns the roots of the arguments whose contents or sizes the node changes."""
        out: frozenset[fx.Node] = frozenset()
        for arg in written_args(node):
            out |= self.roots[arg]
        return out

    def _roots_of(self, node: fx.Node) -> frozenset[fx.Node]:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source = node.args[0]
            shared = self.roots[source]
            return shared if shared != frozenset((source,)) else frozenset((node,))
        if node.op != "call_function" or not isinstance(node.target, compat.OpOverload):
            return frozenset((node,))
        if not any(r.alias_info is not None for r in node.target._schema.returns):
            return frozenset((node,))
        out: frozenset[fx.Node] = frozenset()
        for schema_arg, value in schema_args(node):
            if schema_arg.alias_info is not None:
                for arg in node_args(value):
                    out |= self.roots[arg]
        return out or frozenset((node,))

    def _same_as(self, node: fx.Node) -> fx.Node:
        if node.op == "call_function" and isinstance(node.target, compat.OpOverload):
            returns = node.target._schema.returns
            if len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write:
                written = written_args(node)
                if len(written) == 1:
                    return self.same[written[0]]
        return node


def overlapping(placeholders: list[fx.Node]) -> list[list[fx.Node]]:
    """Returns groups of placeholders in one storage whose extents overlap."""
    by_storage: dict[int, list[fx.Node]] = {}
    for node in placeholders:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and node.users:
            by_storage.setdefault(compat.storage_id(value), []).append(node)
    groups: list[list[fx.Node]] = []
    for nodes in by_storage.values():
        if len(nodes) == 1:
            continue
        values = [node.meta["val"] for node in nodes]
        if any(isinstance(n, torch.SymInt) for value in values for n in (*value.shape, *value.stride())):
            groups.append(nodes)  # of unknown extent
            continue
        end = -1
        group: list[fx.Node] = []
        for node in sorted((n for n in nodes if n.meta["val"].numel()), key=lambda n: extent(n.meta["val"])):
            low, high = extent(node.meta["val"])
            if low >= end:
                groups.append(group := [])
            group.append(node)
            end = max(end, high)
    return [sorted(group, key=placeholders.index) for group in groups if len(group) > 1]


def is_pure(node: fx.Node) -> bool:
    """Returns True if the node may be removed when nothing uses it."""
    if node.op in ("placeholder", "output"):
        return False
    if written_args(node):
        return False
    target = node.target
    if isinstance(target, compat.OpOverload):
        if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
            return False
        if compat.is_collective(target):  # other processes take part in it
            return False
        return bool(target._schema.returns)  # an operator without results performs a check
    return True


def drop_dead(graph: fx.Graph, raises: Callable[[fx.Node], bool] = lambda node: False) -> int:
    """Erases pure nodes without users, but for those that may raise; returns their number."""
    dropped = 0
    for node in reversed(list(graph.nodes)):
        if not node.users and is_pure(node) and not raises(node):
            graph.erase_node(node)
            dropped += 1
    return dropped
