"""Makes cheap values of a whole-step graph again where its backward reads them, when that lowers the peak of memory.

At the end of the forward everything that the backward reads is held. What follows by a few pointwise operations from
values that are held in any case (an activation from its argument, a normalized tensor from its statistics) need not be:
the operations are put in front of the backward's first use once more. The graph is only looked at where such values are
a fair part of the peak; small steps are left alone.
"""

from __future__ import annotations

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.alias_analysis import Aliases
from sidefx_train.compile.graph.fx_utils import written_args

_LEAST = 16 * 2**20
"""Bytes that must be saved at the peak."""

_SHARE = 0.05
"""Part of the peak that must be saved."""

_DISTANCE = 72
"""Values made between two uses: with fewer, Inductor fuses both makings into one kernel, and both are held."""

_LONGEST = 12
"""Operations that make one value again."""


def recompute(module: fx.GraphModule) -> str:
    """Rewrites a functional graph; returns a note for the report, empty if it was left as it is."""
    plan = _Plan(module.graph)
    found = [value for value in plan.values if plan.can_be_made_again(value)]
    saved = sum(plan.size[value] for value in found)
    if saved < max(_LEAST, _SHARE * plan.peak):
        return ""
    for value in found:
        plan.make_again(value)
    module.graph.lint()
    module.recompile()
    megabytes = saved / 2**20
    return (
        f"{len(found)} values are made again in the backward: {megabytes:.0f} of {plan.peak / 2**20:.0f} MiB less held"
    )


class _Plan:
    """Where values are held.

    Attributes:
        values: pointwise results that are held, in order.
        size: bytes of what is held.
        peak: estimate of the most bytes held at once.
        summit: the position where that is.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.aliases = Aliases(graph)
        self.position: dict[fx.Node, float] = {node: i for i, node in enumerate(graph.nodes)}
        self.members: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            for root in self.aliases.roots[node]:
                self.members.setdefault(root, []).append(node)
        self.size = {node: _bytes(node) for node in graph.nodes if self._is_held(node)}
        self.made = sorted(self.position[node] for node in self.size)
        self.peak, self.summit = self._summit()
        self.values = [node for node in self.size if is_pointwise(node) and self.size[node]]
        self.again: dict[fx.Node, tuple[list[fx.Node], list[fx.Node]]] = {}

    def _is_held(self, node: fx.Node) -> bool:
        """True for memory of its own: not an input, not a view, not what is computed within its only reader."""
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        if node not in self.aliases.roots[node] or written_args(node):
            return False
        return not is_pointwise(node) or any(not is_pointwise(user) for user, _ in self.uses(node))

    def uses(self, node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """(reader, what it reads) for a value and its views, in order; views are no readers."""
        found = [
            (user, member)
            for member in self.members.get(node, [node])
            for user in member.users
            if node not in self.aliases.roots.get(user, ())
        ]
        return sorted(found, key=lambda pair: self.position[pair[0]])

    def end(self, node: fx.Node) -> float:
        """Position of the last reader of a node's memory."""
        return max((self.position[u] for root in self.aliases.roots[node] for u, _ in self.uses(root)), default=-1)

    def _summit(self) -> tuple[int, float]:
        changes: dict[float, int] = {}
        for node, size in self.size.items():
            changes[self.position[node]] = changes.get(self.position[node], 0) + size
            end = self.end(node) + 0.5
            changes[end] = changes.get(end, 0) - size
        held, best = 0, (0, 0.0)
        for position in sorted(changes):
            held += changes[position]
            best = max(best, (held, position), key=lambda pair: pair[0])
        return best

    def can_be_made_again(self, value: fx.Node) -> bool:
        """True if the readers behind the summit can be given another copy of the value."""
        uses = self.uses(value)
        early = [self.position[user] for user, _ in uses if self.position[user] <= self.summit]
        late = [user for user, _ in uses if self.position[user] > self.summit]
        if not late or any(user.op == "output" or written_args(user) for user in late):
            return False
        since = max(early, default=self.position[value])
        if sum(since < made < self.position[late[0]] for made in self.made) < _DISTANCE:
            return False
        chain = self._chain(value, self.position[late[0]])
        if chain is None:
            return False
        self.again[value] = (chain, late)
        return True

    def _chain(self, value: fx.Node, at: float) -> list[fx.Node] | None:
        """Operations that make a value from what is held at a position, in order; ``None`` if there are none."""
        found: dict[fx.Node, None] = {value: None}
        todo = [value]
        while todo:
            for used in todo.pop().all_input_nodes:
                held = self._is_held_at(used, at) or _bytes(used) * 16 <= self.size[value]
                if used in found or held:
                    continue
                if len(found) == _LONGEST or not (is_pointwise(used) or self._is_view(used)):
                    return None
                found[used] = None
                todo.append(used)
        return sorted(found, key=self.position.__getitem__)

    def _is_held_at(self, node: fx.Node, at: float) -> bool:
        """True if something reads a node's memory behind a position in any case."""
        given = node.op in ("placeholder", "get_attr")
        return given or (self.end(node) > at and not any(root in self.again for root in self.aliases.roots[node]))

    def _is_view(self, node: fx.Node) -> bool:
        return isinstance(node.target, compat.OpOverload) and node not in self.aliases.roots[node]

    def make_again(self, value: fx.Node) -> None:
        """Puts the chain in front of the first late reader and lets all late ones read its result."""
        chain, late = self.again[value]
        copies: dict[fx.Node, fx.Node] = {}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies and value in self.aliases.roots[node]:
                copies[node] = self.graph.node_copy(node, copied)  # a view of the value
            return copies.get(node, node)

        with self.graph.inserting_before(late[0]):
            for node in chain:
                copies[node] = self.graph.node_copy(node, lambda used: copies.get(used, used))
            for user in late:
                for read in user.all_input_nodes:
                    if value in self.aliases.roots[read]:
                        user.replace_input_with(read, copied(read))


def is_pointwise(node: fx.Node) -> bool:
    """True for operations that Inductor computes within the kernels that read them."""
    if node.op != "call_function" or not isinstance(node.target, compat.OpOverload):
        return False
    if compat.is_random(node.target):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target._schema.name == "prims::convert_element_type"


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return 0
    return value.numel() * value.itemsize
