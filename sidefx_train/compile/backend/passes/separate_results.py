"""Gives results of their own storage to a graph in which equal values were merged.

Common-subexpression elimination makes one node of equal values: three gradients of zeros, for example. Eager has three
tensors, and whoever writes one of them does not change the others.
"""

from __future__ import annotations

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
    output = module.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    taken = {node: compat.storage_id(node.meta["val"]) for node in inputs if isinstance(node.meta["val"], torch.Tensor)}
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


def _root(node: fx.Node) -> fx.Node:
    """Returns the node whose memory a result views."""
    while isinstance(node.target, compat.OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node
