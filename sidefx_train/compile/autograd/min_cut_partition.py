"""Partitions a joint graph: decides what the forward saves for its backward, and what the backward recomputes.

:mod:`~sidefx_train.compile.autograd.extract_graphs` saves what autograd would save. :func:`recompute` saves the
cheapest set of values (torch's min-cut partitioner) from which cheap operations recompute the others. Only operations
with reproducible results run twice: no random draws, and no storage that the joint graph writes. The backward reads
only what autograd would have saved, so the user may change the same tensors between the two passes.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.autograd.joint_graph import JointGraph, Origin
from sidefx_train.compile.autograd.saved_tensor_errors import Saved, SavedCheck
from sidefx_train.compile.autograd.symbol_inputs import symbol_nodes
from sidefx_train.compile.graph.alias_analysis import Aliases, drop_dead, is_pure
from sidefx_train.compile.graph.artifacts import GraphInput

aten = torch.ops.aten


def recompute(joint: JointGraph) -> JointGraph:
    """Returns the same joint graph with less to save, or ``joint`` itself if that is not possible.

    A backward in several stages saves what autograd would save.
    """
    if len(joint.stages) != 1 or not joint.compiled:
        return joint
    plan = _Plan(joint)
    if not any(plan.again.get(node) for node in plan.saved):
        return joint
    kept = plan.cut()
    if not compat.bytes_of(kept) < compat.bytes_of(plan.saved):
        return joint
    return plan.rebuild(set(kept))


class _Plan:
    """Values that may be recomputed.

    Attributes:
        fed: the forward's node of each input of the backward, without tangents.
        given: those that stay alive in any case: inputs, their views, and aliases of outputs.
        saved: the others.
        again: reproducible nodes of the forward, and whether they need an operation.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        (self.stage,) = joint.compiled
        self.forward, self.backward = joint.forward.module.graph, self.stage.backward.module.graph
        self.placeholders = [n for n in self.forward.nodes if n.op == "placeholder"]
        self.returned: list[fx.Node] = list(_output(self.forward).args[0])  # type: ignore[arg-type]
        self.taken = [n for n in self.backward.nodes if n.op == "placeholder"]
        self.fed: dict[fx.Node, fx.Node] = {}
        for node, (kind, i) in zip(self.taken, self.stage.feeds, strict=True):
            if kind != "tangent":
                self.fed[node] = self.placeholders[i] if kind == "input" else self.returned[i]
        self.aliases = Aliases(self.forward)
        shared = {self.returned[i] for i, *_ in (*joint.aliases, *joint.counted)} | set(self.returned[: joint.outputs])
        self.given = {n for n in self.fed.values() if n in shared or self._of_inputs(n)}
        self.saved = [n for n in dict.fromkeys(self.fed.values()) if n not in self.given]
        self.again = self._again()

    def _of_inputs(self, node: fx.Node) -> bool:
        return all(root.op == "placeholder" for root in self.aliases.roots[node])

    def _again(self) -> dict[fx.Node, bool]:
        roots = self.aliases.roots
        written = self._written()
        outputs = {r for n in self.returned[: self.joint.outputs] if isinstance(n, fx.Node) for r in roots[n]}
        found: dict[fx.Node, bool] = {}
        for node in self.forward.nodes:
            same = not roots[node] & written and not self.aliases.reads(node) & written
            makes = node.op == "call_function" and not roots[node] & outputs and _repeats(node)
            if node.op == "get_attr" or node in self.given or (node.op == "placeholder" and _is_number(node)):
                if same:
                    found[node] = False
            elif same and makes and all(used in found for used in node.all_input_nodes):
                found[node] = True
        return found

    def _written(self) -> set[fx.Node]:
        """Returns the forward's root nodes of all storages that either graph writes."""
        found = {root for node in self.forward.nodes for root in self.aliases.writes(node)}
        of_backward = Aliases(self.backward)
        for node in self.backward.nodes:
            for root in of_backward.writes(node):
                if root in self.fed:
                    found |= self.aliases.roots[self.fed[root]]
        return found

    def cut(self) -> list[fx.Node]:
        """Returns the nodes to save, chosen by torch's partitioner on a reduced graph."""
        graph = fx.Graph()
        alias: dict[fx.Node, fx.Node] = {}
        free: set[fx.Node] = set()
        for node in self._relevant():
            if self.again.get(node):
                viewed = self.aliases.roots[node] != frozenset((node,)) and node.target is not operator.getitem
                target = aten.view.default if viewed else node.target
                alias[node] = graph.call_function(target, tuple(alias[used] for used in node.all_input_nodes))
            else:
                alias[node] = graph.placeholder(f"primals_{len(alias)}")
                if node in self.again:
                    free.add(alias[node])
            alias[node].meta = {"val": node.meta.get("val")}
        forward = set(alias.values())
        if all(node.op != "placeholder" for node in forward):
            return []  # everything follows from constants
        of_alias = {value: key for key, value in alias.items()}
        for node in self.backward.nodes:
            if node.op == "placeholder":
                alias[node] = alias[self.fed[node]] if node in self.fed else graph.placeholder(f"tangents_{node.name}")
                alias[node].meta.setdefault("val", node.meta.get("val"))
            elif node.op == "call_function":
                made = graph.call_function(node.target, tuple(alias[n] for n in node.all_input_nodes if n in alias))
                made.meta = {"val": node.meta.get("val")}
                alias[node] = made
        graph.output(())
        return [
            of_alias[node]
            for node in compat.min_cut(graph, forward, free)
            if of_alias[node] not in self.again or self.again[of_alias[node]]
        ]

    def _relevant(self) -> list[fx.Node]:
        """Returns what the backward reads and what that can be computed from."""
        found: set[fx.Node] = set()
        todo = list(self.fed.values())
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += node.all_input_nodes if self.again.get(node) else []
        return [node for node in self.forward.nodes if node in found]

    def rebuild(self, kept: set[fx.Node]) -> JointGraph:
        """Returns the two graphs for a set of values to save."""
        joint, stage, module = self.joint, self.stage, self.joint.forward.module
        feeds: list[Origin] = []
        inputs: list[GraphInput] = []
        results: list[fx.Node] = self.returned[: joint.outputs]
        output_of = {self.returned[i]: output for i, output in joint.aliases}
        own = {self.returned[i] for i in joint.own_counters}
        counter_of = {self.returned[i]: (position, itself) for i, position, itself in joint.counted}
        counted: list[tuple[int, int, bool]] = []
        aliases: list[tuple[int, int]] = []
        own_counters: list[int] = []
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        wanted = self._taken_by(kept)
        tangents = [node for node in self.taken if node not in self.fed]
        wanted += symbol_nodes(self.forward, list(self.forward.nodes), [*wanted, *tangents])
        known = {
            self.fed[n]: given for n, given in zip(self.taken, stage.backward.inputs, strict=True) if n in self.fed
        }
        for node in wanted:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta.update(node.meta)
            inputs.append(replace(_as_input(node), writes=known[node].writes if node in known else None))
            if node.op == "placeholder":
                feeds.append(("input", self.placeholders.index(node)))
                continue
            if node not in results:
                results.append(node)
                if node in output_of:
                    aliases.append((len(results) - 1, output_of[node]))
                if node in own:
                    own_counters.append(len(results) - 1)
                if node in counter_of:
                    counted.append((len(results) - 1, *counter_of[node]))
            feeds.append(("result", results.index(node)))
        for node, given, feed in zip(self.taken, stage.backward.inputs, stage.feeds, strict=True):
            if feed[0] == "tangent":
                copies[node] = graph.placeholder(node.name)
                copies[node].meta.update(node.meta)
                inputs.append(given)
                feeds.append(feed)

        said = {self.fed[node]: saved for node, saved in zip(self.taken, stage.saved, strict=False) if node in self.fed}

        def copied(node: fx.Node) -> fx.Node:
            """Copies a node of either graph to the new backward; a node of the forward is copied where it is first
            read."""
            node = self.fed.get(node, node)
            if node not in copies:
                for used in node.all_input_nodes:
                    copied(used)
                copies[node] = graph.node_copy(node, copied)
            return copies[node]

        for node in self.backward.nodes:
            if node.op == "output":
                graph.output(fx.map_arg(node.args[0], copied))
            elif node.op != "placeholder":
                copied(node)
        constants = {  # of both: recomputed nodes may read a constant of the forward
            str(node.target): getattr(source, str(node.target))
            for source in (module, stage.backward.module)
            for node in source.graph.nodes
            if node.op == "get_attr"
        }
        module_of_backward = compat.graph_module(constants, graph)
        backward = replace(stage.backward, module=module_of_backward, inputs=tuple(inputs))
        returned = len(next(node for node in reversed(self.forward.nodes) if node.op == "output").args[0])

        def moved(i: int) -> int:  # shells come last
            return i if i < returned else i - returned + len(results)

        places = [(place, moved(i) if place == "result" else i, version) for (place, i), version in stage.watched]
        return replace(
            joint,
            forward=replace(joint.forward, module=_returning(module, results)),
            stages=(
                replace(
                    stage,
                    backward=backward,
                    results=tuple(map(moved, stage.results)),
                    watched=tuple(((place, i), version) for place, i, version in places),
                    feeds=tuple(feeds),
                    saved=tuple(said.get(node, Saved()) for node in wanted),
                    saved_checks=self._saved_checks(wanted),
                ),
            ),
            aliases=tuple(aliases),
            own_counters=tuple(own_counters),
            counted=tuple(counted),
        )

    def _saved_checks(self, wanted: list[fx.Node]) -> tuple[SavedCheck, ...]:
        """Returns the checks by positions in the new backward; inputs of recomputed values replace these."""
        position = {node: i for i, node in enumerate(wanted)}
        old = [self.fed[node] for node in self.taken if node in self.fed]
        found: list[SavedCheck] = []
        for check in self.stage.saved_checks:
            todo, seen = [old[i] for i in check.saved], set[fx.Node]()
            while todo:
                node = todo.pop()
                if node not in seen:
                    seen.add(node)
                    todo += [] if node in position else node.all_input_nodes
            found.append(replace(check, saved=frozenset(position[node] for node in seen if node in position)))
        return tuple(found)

    def _taken_by(self, kept: set[fx.Node]) -> list[fx.Node]:
        """Returns the nodes of the forward that are inputs of the new backward."""
        found: set[fx.Node] = set()
        todo, seen = list(self.fed.values()), set[fx.Node]()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if self.again.get(node) and node not in kept:
                todo += node.all_input_nodes
            elif node.op != "get_attr":
                found.add(node)
        return [node for node in self.forward.nodes if node in found]


def _repeats(node: fx.Node) -> bool:
    """Returns True for an operation with a reproducible result."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, compat.OpOverload) and is_pure(node) and not _is_number(node)


def _is_number(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _as_input(node: fx.Node) -> GraphInput:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return GraphInput(node.name, "tensor", compat.fake_snapshot(value), node.name)
    return GraphInput(node.name, "scalar", value, node.name, hint=compat.hint_of(value))


def _output(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def _returning(module: fx.GraphModule, results: list[fx.Node]) -> fx.GraphModule:
    """Returns the same graph with other results."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, lambda used: copies[used])
    graph.output(tuple(copies[node] if isinstance(node, fx.Node) else node for node in results))
    drop_dead(graph)
    return compat.graph_module(module, graph)
