"""Rematerialization: recomputes cheap values before their use in the backward, if that lowers the memory peak.

At the end of the forward everything that the backward reads is alive. Values that a few pointwise operations compute
from values that stay alive in any case (an activation from its argument, a normalized tensor from its statistics) need
not be: the operations are repeated before the backward's first use. Only graphs in which such values are a substantial
part of the peak are changed; small steps are left alone.
"""

from __future__ import annotations

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.alias_analysis import Aliases
from sidefx_train.compile.graph.fx_utils import written_args

_LEAST = 16 * 2**20
"""Minimum of bytes to save at the peak."""

_SHARE = 0.05
"""Minimal fraction of the peak to save."""

_DISTANCE = 72
"""Minimum of values computed between two uses: with fewer, Inductor fuses both computations, and both stay alive."""

_LONGEST = 12
"""Limit of operations to recompute one value."""


def recompute(module: fx.GraphModule) -> str:
    """Rewrites a functional graph; returns a note for the report, empty if it is unchanged."""
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
    return f"{len(found)} values are recomputed in the backward: {megabytes:.0f} of {plan.peak / 2**20:.0f} MiB saved"


class _Plan:
    """Lifetimes of values.

    Attributes:
        values: pointwise results that are stored, in order.
        size: bytes of stored values.
        peak: estimate of the most bytes alive at once.
        summit: the position of the peak.
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
        """Returns True for a stored value: not an input, not a view, not computed within its only reader."""
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        if node not in self.aliases.roots[node] or written_args(node):
            return False
        return not is_pointwise(node) or any(not is_pointwise(user) for user, _ in self.uses(node))

    def uses(self, node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """Returns (reader, what it reads) for a value and its views, in order; views are not readers."""
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
        """Returns True if the readers after the peak can use a copy of the value."""
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
        """Returns operations that compute a value from values alive at a position, in order; ``None`` if there are
        none."""
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
        """Returns True if a node's memory is read after a position in any case."""
        given = node.op in ("placeholder", "get_attr")
        return given or (self.end(node) > at and not any(root in self.again for root in self.aliases.roots[node]))

    def _is_view(self, node: fx.Node) -> bool:
        return isinstance(node.target, compat.OpOverload) and node not in self.aliases.roots[node]

    def make_again(self, value: fx.Node) -> None:
        """Inserts the operations before the first late reader and makes all late ones read their result."""
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
    """Returns True for operations that Inductor computes within the kernels that read them."""
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
