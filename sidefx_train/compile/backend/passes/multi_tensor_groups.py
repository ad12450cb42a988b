"""Finds updates of many tensors by the same elementwise expression.

An optimizer that is no fused kernel updates every parameter by operations of its own, which Inductor fuses to one
kernel a parameter. They become one kernel of all (``gpu/multi_tensor``), which runs behind the graph
(``multi_tensor_rewrite.py``). What only updates use moves with them: unscaled and clipped gradients, weight decay,
flags that keep the old values, bias corrections.

A gradient that is computed by a kernel of Inductor's keeps its update, which is fused into that kernel.
"""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.passes.elementwise_nodes import is_tensor, operation_of, value_of
from sidefx_train.compile.backend.passes.update_expressions import ExpressionWriter
from sidefx_train.compile.gpu.multi_tensor import Expression
from sidefx_train.compile.graph.artifacts import FunctionalGraph, Name
from sidefx_train.compile.graph.fx_utils import written_args
from sidefx_train.compile.graph.strided_layout import is_dense, is_static

aten = torch.ops.aten

FEWEST = 2
"""Tensors of a group."""

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "conv", "_scaled_dot")
_LIBRARY = tuple(f"aten::{name}" for name in (*_PRODUCTS, "index_put", "_amp_foreach"))
"""Beginnings of the names of operators into whose kernels Inductor fuses nothing that follows."""


@dataclass(frozen=True)
class Member:
    """The update of tensors of one size.

    Attributes:
        targets: the ``copy_`` of each tensor that is written.
        leaves: what is read, in the order of the expression's slots.
        kept: results of the graph that are computed as well, such as clipped gradients, each with the leaf in whose
            memory it is stored.
    """

    targets: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]
    kept: tuple[tuple[fx.Node, fx.Node], ...] = ()

    def written(self) -> list[fx.Node]:
        """Returns what is written, in the order of the expression's results."""
        return [*(target.args[0] for target in self.targets), *(leaf for _, leaf in self.kept)]  # type: ignore[list-item]


@dataclass(frozen=True)
class Group:
    """Updates by one expression.

    Attributes:
        expression: the new values.
        members: the tensors.
    """

    expression: Expression
    members: tuple[Member, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each member."""
        return tuple(value_of(member.targets[0].args[0]).numel() for member in self.members)

    def written(self) -> list[fx.Node]:
        """Returns what is written, that of each result one after the other."""
        written = [member.written() for member in self.members]
        return [nodes[i] for i in range(len(self.expression.results)) for nodes in written]

    def read(self) -> list[fx.Node]:
        """Returns what is read, slot by slot."""
        return [member.leaves[i] for i in range(len(self.expression.slots)) for member in self.members]

    def foreign(self) -> set[fx.Node]:
        """Returns the placeholders that a member reads and does not write itself."""
        return {
            leaf
            for member in self.members
            for leaf in member.leaves
            if leaf.op == "placeholder" and leaf not in {target.args[0] for target in member.targets}
        }


def find_groups(graph: FunctionalGraph) -> list[Group]:
    """Returns the updates of a graph that could run behind it, in an order in which they may run.

    Views that cancel each other, which hide what an update computes, are removed from the graph.
    """
    _cancel_views(graph.module.graph)
    finder = _Finder(graph)
    groups: dict[Expression, list[Member]] = defaultdict(list)
    for targets in finder.connected():
        made = finder.member(targets)
        if made is not None:
            groups[made[0]].append(made[1])
    found = [Group(expression, tuple(members)) for expression, members in groups.items() if len(members) >= FEWEST]
    return _in_order(found, finder.written)


def erase(graph: fx.Graph, targets: Sequence[fx.Node]) -> None:
    """Erases nodes, and what only they use."""
    doomed, waiting = set(targets), list(targets)
    while waiting:
        new = [each for each in waiting.pop().all_input_nodes if each not in doomed]
        doomed.update(new)
        waiting += new
    for node in reversed(graph.nodes):
        if node in doomed and node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _cancel_views(graph: fx.Graph) -> None:
    """Replaces a view that is the same as what it is a view of, such as a transpose of a transpose."""
    results = set(graph.output_node().all_input_nodes)
    replaced = []
    for node in list(graph.nodes):
        chain: list[fx.Node] = []
        source = node
        while isinstance(source.target, compat.OpOverload) and source.target in _VIEWS:
            chain.insert(0, source)
            source = source.args[0]  # type: ignore[assignment]
            if node not in results and len(chain) > 1 and _is_identity(source, chain):
                node.replace_all_uses_with(source)
                replaced.append(node)
                break
    erase(graph, replaced)


_VIEWS = (aten.permute.default, aten.view.default, aten._unsafe_view.default, aten.alias.default, aten.t.default)


def _is_identity(source: fx.Node, chain: Sequence[fx.Node]) -> bool:
    """Returns True if views of views of a value have its elements in its order, whatever its strides are."""
    if not is_static(value_of(source)) or value_of(source).shape != value_of(chain[-1]).shape:
        return False
    rows = torch.empty(value_of(source).shape, device="meta")
    seen = rows
    for node in chain:
        seen = node.target(seen, *node.args[1:])  # type: ignore[operator]
    return seen.stride() == rows.stride()


def packed_index(node: fx.Node, names: dict[fx.Node, str]) -> int | None:
    """Returns which element of the scalar buffer a node is."""
    if node.target is not aten.select.int or names.get(node.args[0]) != "packed":  # type: ignore[arg-type]
        return None
    return int(node.args[2])  # type: ignore[arg-type]


def _in_order(groups: list[Group], written: set[fx.Node]) -> list[Group]:
    """Returns the groups that may run one after the other behind the graph, in their order.

    Args:
        groups: the groups.
        written: all placeholders that the graph writes, together with the groups.
    """
    while True:
        order = _readers_first(groups)
        by_graph = written - {node for group in order for node in group.written()}
        kept = [group for group in order if not group.foreign() & by_graph]
        if len(kept) == len(groups):
            return kept
        groups = kept


def _readers_first(groups: list[Group]) -> list[Group]:
    """Returns the groups so that each comes before those that write what it reads; without those of a cycle."""
    order: list[Group] = []
    left = list(groups)
    while left:
        read = set[fx.Node]().union(*(group.foreign() for group in left))
        free = [group for group in left if not read & set(group.written())]
        if not free:
            break
        order += free
        left = [group for group in left if read & set(group.written())]
    return order


class _Finder:
    """Finds what can be taken out of a graph.

    Attributes:
        written: the placeholders that the graph writes.
    """

    def __init__(self, graph: FunctionalGraph) -> None:
        self._nodes = list(graph.module.graph.nodes)
        self._index = {node: i for i, node in enumerate(self._nodes)}
        self._device = graph.device
        placeholders = [node for node in self._nodes if node.op == "placeholder"]
        self._names = dict(zip(placeholders, graph.feeds, strict=True))
        self._in_tail = {
            str(name) for call in graph.tail for name in names_in((call.args, tuple(call.kwargs.values())))
        }
        results = list(graph.module.graph.output_node().args[0])  # type: ignore[arg-type]
        self._results = {node for node in results if isinstance(node, fx.Node)}
        self._only_shown = {results[i] for i in _only_shown(graph) if results.count(results[i]) == 1}
        later = {target for target, _ in graph.deferred_copies}
        self.written = {written for node in self._nodes for written in written_args(node)}
        self.written |= {node for node, name in self._names.items() if name in later}
        self._shown = {_origin(node) for node in self._results}
        """Inputs of which a result of the graph is, or may become, another name."""
        self._copies = [node for node in self._nodes if self._is_target(node)]
        self._inside: dict[fx.Node, tuple[str, tuple[Any, ...]]] = {}
        """What only updates use, with its operation."""
        self._ancestors: dict[fx.Node, set[fx.Node]] = {}
        self._families: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._find_inside()

    def _is_target(self, node: fx.Node) -> bool:
        """Returns True for a node that writes a dense tensor of fixed size which nothing but this graph has."""
        if node.target is not aten.copy_.default or node.args[0] not in self._names:
            return False
        target, source = node.args[:2]
        name = self._names[target]  # type: ignore[index]
        if not name.startswith("a") or name in self._in_tail or target in self._shown or not is_tensor(source):
            return False
        kept, new = value_of(target), value_of(source)
        if not is_tensor(target) or kept.device != self._device or not is_static(kept) or not is_dense(kept):
            return False
        return bool(kept.numel()) and (new.shape == kept.shape or not new.dim())

    def _find_inside(self) -> None:
        targets = set(self._copies)
        for node in reversed(self._nodes):
            users = [user for user in node.users if user.op != "output"]
            if not users or not is_tensor(node) or value_of(node).device != self._device:
                continue
            if node in self._results and node not in self._only_shown:
                continue
            operation = operation_of(node)
            shape = value_of(node).shape
            if operation is not None and all(
                (user in targets or user in self._inside) and shape in (value_of(user).shape, ()) for user in users
            ):
                self._inside[node] = operation

    def connected(self) -> Iterator[list[fx.Node]]:
        """Yields the ``copy_`` nodes whose new values have intermediate results in common."""
        owner: dict[fx.Node, int] = {}
        parts: dict[int, list[fx.Node]] = {}
        for number, target in enumerate(self._copies):
            shared = [node for node in self._own(target) if value_of(node).dim()]
            joined = {owner[node] for node in shared if node in owner}
            parts[number] = [each for other in sorted(joined) for each in parts.pop(other)] + [target]
            owner.update((node, number) for node in shared)
            owner.update([(node, number) for node, other in owner.items() if other in joined] if joined else [])
        yield from parts.values()

    def _own(self, target: fx.Node) -> list[fx.Node]:
        """Returns the nodes inside from which a new value is computed."""
        found: dict[fx.Node, None] = {}
        waiting = [target.args[1]]
        while waiting:
            node = waiting.pop()
            if isinstance(node, fx.Node) and node in self._inside and node not in found:
                found[node] = None
                waiting += node.all_input_nodes
        return list(found)

    def member(self, targets: list[fx.Node]) -> tuple[Expression, Member] | None:
        """Returns the expression of connected updates; ``None`` if they must stay in the graph."""
        targets = sorted(targets, key=self._index.__getitem__)
        own = {node for target in targets for node in self._own(target)}
        shown = sorted(own & self._results, key=self._index.__getitem__)
        writer = ExpressionWriter(self._inside, value_of(targets[0].args[0]))
        expression = writer.expression(targets, shown)
        leaves = tuple(writer.leaves)
        if expression is None or not all(map(self._may_be_read, leaves)) or self._is_fused_elsewhere(leaves):
            return None
        kept: list[tuple[fx.Node, fx.Node]] = []
        for node in shown:
            free = [
                leaf for leaf in leaves if leaf not in {leaf for _, leaf in kept} and self._may_hold(leaf, node, own)
            ]
            if not free:
                return None
            kept.append((node, free[0]))
        return expression, Member(tuple(targets), leaves, tuple(kept))

    def _may_hold(self, leaf: fx.Node, result: fx.Node, own: set[fx.Node]) -> bool:
        """Returns True if nothing reads a leaf's memory behind the graph but this update, and a result fits in it."""
        one, other, base = value_of(leaf), value_of(result), _origin(leaf)
        if leaf.op != "call_function" or packed_index(leaf, self._names) is not None:
            return False
        if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
            return False
        if value_of(base).numel() != one.numel() or not _has_own_memory(base):
            return False
        family = self._views_of(base)
        behind = {user for node in family for user in node.users if user in self._inside or user in self._copies}
        return behind <= own and not self._results & set(family) - own and leaf not in self._results

    def _views_of(self, base: fx.Node) -> list[fx.Node]:
        """Returns the nodes that may share a value's memory, and the value."""
        if not self._families:
            for node in self._nodes:
                if is_tensor(node):
                    self._families[_origin(node)].append(node)
        return self._families[base]

    def _may_be_read(self, leaf: fx.Node) -> bool:
        """Returns True for an input, an element of the scalar buffer, or a value with memory of its own."""
        if packed_index(leaf, self._names) is not None:
            return True
        if leaf in self._names:
            return self._names[leaf].startswith("a") and self._names[leaf] not in self._in_tail
        return leaf.op == "call_function" and _origin(leaf) not in self._names

    def _is_fused_elsewhere(self, leaves: Sequence[fx.Node]) -> bool:
        """Returns True if Inductor can compute the update in the kernel that computes what it reads.

        It cannot where the update reads another value too that depends on the first, such as the norm of all gradients.
        """
        made = [leaf for leaf in leaves if leaf not in self._names and packed_index(leaf, self._names) is None]
        own = [leaf for leaf in made if value_of(leaf).dim() and not _is_of_library(leaf)]
        return any(not any(leaf in self._before(other) for other in made if other is not leaf) for leaf in own)

    def _before(self, node: fx.Node) -> set[fx.Node]:
        """Returns what a node depends on."""
        if node not in self._ancestors:
            found: set[fx.Node] = set()
            waiting = [node]
            while waiting:
                for each in waiting.pop().all_input_nodes:
                    if each not in found:
                        found.add(each)
                        waiting.append(each)
            self._ancestors[node] = found
        return self._ancestors[node]


def names_in(value: Any) -> list[Name]:
    """Returns the names in nested arguments."""
    if isinstance(value, Name):
        return [value]
    return [name for item in value for name in names_in(item)] if isinstance(value, (list, tuple)) else []


def _origin(node: fx.Node) -> fx.Node:
    """Returns the node that a value is a view of, or may be after operations without effect are removed."""
    while isinstance(node.target, compat.OpOverload) and (
        node.target.is_view or node.target in (aten.clone.default, aten.copy.default, aten._to_copy.default)
    ):
        source = node.args[1] if node.target is aten.copy.default else node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def _only_shown(graph: FunctionalGraph) -> list[int]:
    """Returns the positions of results that nothing reads but the program, once each."""
    others = [*graph.late, *(name for _, name in graph.deferred_copies), *(str(flag) for *_, flag in graph.counters)]
    others += [str(name) for call in graph.tail for name in names_in((call.args, tuple(call.kwargs.values())))]
    others += [graph.report or ""]
    read = set(re.findall(r"\br\d+\b", "\n".join(others)))
    shown = Counter(str(out.value) for out in graph.outputs if out.kind == "result" and str(out.value)[0] == "r")
    named = {str(out.value) for out in graph.outputs if out.kind != "result" and isinstance(out.value, Name)}
    return [int(name[1:]) for name, count in shown.items() if count == 1 and name not in read | named]


def _has_own_memory(node: fx.Node) -> bool:
    """Returns False for an item of several that share memory, such as one of a split."""
    if node.target is not operator.getitem:
        return True
    target = node.args[0].target  # type: ignore[union-attr]
    return isinstance(target, compat.OpOverload) and not any(each.alias_info for each in target._schema.returns)


def _is_of_library(node: fx.Node) -> bool:
    """Returns True if a value is computed by a kernel that Inductor does not generate, or scatters."""
    node = _origin(node)
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    target = node.target
    if not isinstance(target, compat.OpOverload):
        return False
    return target.namespace not in ("aten", "prims") or target._schema.name.startswith(_LIBRARY)
