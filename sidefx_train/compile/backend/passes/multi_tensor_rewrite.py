"""Takes updates of many tensors out of a graph, and makes graphs of them alone.

The updates (``multi_tensor_groups.py``) become calls behind the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.passes.elementwise_nodes import value_of
from sidefx_train.compile.backend.passes.multi_tensor_groups import Group, erase, names_in, packed_index
from sidefx_train.compile.gpu.multi_tensor import MULTI_TENSOR_UPDATE
from sidefx_train.compile.graph.artifacts import FunctionalGraph, Name, TailCall

aten = torch.ops.aten


def batch(graph: FunctionalGraph, groups: Sequence[Group]) -> FunctionalGraph:
    """Returns a graph without these updates, which run behind it; its module is changed in place."""
    nodes = graph.module.graph
    output = nodes.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    placeholders = [node for node in nodes.nodes if node.op == "placeholder"]
    names = dict(zip(placeholders, graph.feeds, strict=True))
    for kept, leaf in (pair for group in groups for member in group.members for pair in member.kept):
        results[results.index(kept)] = leaf

    def name(node: fx.Node) -> Name:
        packed = packed_index(node, names)
        if packed is not None:
            return Name(f"packed[{packed}]")
        if node in names:
            return Name(names[node])
        if node not in results:
            results.append(node)
        return Name(f"r{results.index(node)}")

    calls = []
    for group in groups:
        written, read = [name(node) for node in group.written()], [name(node) for node in group.read()]
        calls.append(TailCall(MULTI_TENSOR_UPDATE, (written, read, group.expression, group.sizes), {}))
    output.args = (tuple(results),)
    erase(nodes, [target for group in groups for member in group.members for target in member.targets])
    graph.module.recompile()
    values = tuple(node.meta.get("val") if isinstance(node, fx.Node) else node for node in results)
    return replace(graph, results=values, tail=(*graph.tail, *calls))


def update_module(group: Group) -> tuple[fx.GraphModule, list[int], list[int]]:
    """Returns a graph of nothing but these updates, and the positions of its inputs that are written, and read.

    The positions are in the order of :meth:`Group.written` and :meth:`Group.read`.
    """
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    inputs = list(dict.fromkeys([*group.written(), *group.read()]))
    for position, node in enumerate(inputs):
        made[node] = graph.placeholder(f"x{position}")
        made[node].meta = {"val": value_of(node)}

    def copied(node: fx.Node) -> fx.Node:
        if node not in made:
            sources = {each: copied(each) for each in node.all_input_nodes}
            made[node] = graph.node_copy(node, sources.__getitem__)
        return made[node]

    for member in group.members:
        for target in member.targets:
            copied(target)
        for kept, leaf in member.kept:
            write = graph.call_function(aten.copy_.default, (made[leaf], copied(kept)))
            write.meta = {"val": value_of(leaf)}
    graph.output(())
    places = {node: position for position, node in enumerate(inputs)}
    module = compat.late_module(torch.nn.Module(), graph)
    return module, [places[node] for node in group.written()], [places[node] for node in group.read()]


def results_with_own_memory(graph: FunctionalGraph) -> frozenset[int]:
    """Returns the positions of results that may share memory with nothing: the program gets them, or updates write
    results, and read others."""
    calls = [call for call in graph.tail if call.op is MULTI_TENSOR_UPDATE]
    results = {name.text for call in calls for name in names_in(call.args) if name.text[0] == "r"}
    writes = any(name.text[0] == "r" for call in calls for name in call.args[0])
    return graph.escaping | {int(name[1:]) for name in results if writes}
