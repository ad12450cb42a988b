"""Gives results of their own storage to a graph in which equal values were merged, and orders writes to its inputs.

Common-subexpression elimination makes one node of equal values: three gradients of zeros, for example. Eager has three
tensors, and whoever writes one of them does not change the others. Copies are removed as well, also that of a weight
that another input gets before the weight is updated.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat


def separate_results(module: fx.GraphModule, before: tuple[Any, ...], escaping: Collection[int]) -> None:
    """Copies results that share memory, with each other or with an input, and did not before.

    Args:
        module: the graph after passes that merge nodes; it is changed.
        before: values of its results before them.
        escaping: positions of the results that the program gets.
    """
    _share_as_merged(module.graph)
    output = module.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    taken = {
        (node, None): compat.storage_id(node.meta["val"])
        for node in inputs
        if isinstance(node.meta["val"], torch.Tensor)
    }
    for position in sorted(escaping):
        node, was = results[position], before[position]
        if not isinstance(node, fx.Node) or not isinstance(was, torch.Tensor):
            continue
        root, own = _root(node), compat.storage_id(was)
        if taken.setdefault(root, own) == own:
            continue
        # Before the updates of inputs, which come last.
        before_it = node.next if node.op != "placeholder" else inputs[-1].next
        with module.graph.inserting_before(before_it):
            copy = module.graph.call_function(torch.ops.aten.clone.default, (node,))
        value = node.meta["val"]
        with value.fake_mode:  # with storage of its own: later passes compare it
            copy.meta = {**node.meta, "val": value.clone()}
        results[position] = copy
    if results != list(output.args[0]):  # type: ignore[arg-type]
        output.args = (tuple(results),)
        module.recompile()


def order_writes(graph: fx.Graph) -> None:
    """Has an input written after what other inputs get from its old value; if two get each other's, one is copied."""
    output = graph.output_node()
    writes = {node.args[0]: node for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    reads: dict[Any, Any] = {target: compat.holder_of(write.args[1]) for target, write in writes.items()}
    reads = {target: source for target, source in reads.items() if source in writes and source is not target}
    if not reads:
        return
    readers = Counter(reads.values())
    ready = [target for target in writes if not readers[target]]
    for target in ready:
        source = reads.get(target)
        readers[source] -= 1
        if source is not None and not readers[source]:
            ready.append(source)
    exchanged = [target for target in writes if readers[target] > 0]  # each gets the value of another one of these
    first = next(iter(writes.values()))
    for target in exchanged:
        value: Any = writes[target].args[1]
        with graph.inserting_before(first):
            copied = graph.call_function(torch.ops.aten.clone.default, (value,))
        with value.meta["val"].fake_mode:
            copied.meta = {**value.meta, "val": value.meta["val"].clone()}
        writes[target].replace_input_with(value, copied)
    for target in (*ready, *exchanged):
        output.prepend(writes[target])


def _share_as_merged(graph: fx.Graph) -> None:
    """Gives views, and parts of operations, values in the memory of the node that theirs was merged with.

    Inductor removes a copy if its operand shares memory with no result, as far as these values tell.
    """
    for node in graph.nodes:
        if node.target is operator.getitem:
            whole = node.args[0].meta.get("val")
            if isinstance(whole, (list, tuple)):
                node.meta["val"] = whole[node.args[1]]
        elif _is_view(node) and isinstance(viewed := node.all_input_nodes[0].meta.get("val"), torch.Tensor):
            value = node.meta["val"]
            parts = value if isinstance(value, (list, tuple)) else [value]
            if any(isinstance(part, torch.Tensor) and not _share(part, viewed) for part in parts):
                args, named = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
                with viewed.fake_mode:
                    node.meta["val"] = node.target(*args, **named)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return compat.storage_id(one) == compat.storage_id(other)


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, compat.OpOverload) and node.target.is_view and bool(node.all_input_nodes)


def _root(node: fx.Node) -> tuple[fx.Node, Any]:
    """Returns the node whose memory a result views, and which of its parts."""
    while True:
        if node.target is operator.getitem and not _is_view(node.args[0]):
            return node.args[0], node.args[1]
        if node.target is not operator.getitem and not _is_view(node):
            return node, None
        node = node.all_input_nodes[0]
