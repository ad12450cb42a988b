"""Torch's min-cut solver, which decides what a forward saves for its backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from sidefx_train.torch_compat.symbols import hint_of


def bytes_of(nodes: Iterable[fx.Node]) -> int:
    """Returns the memory of the nodes' values; views count once; symbolic sizes have their values in the capture."""
    found: dict[int, int] = {}
    for value in (node.meta.get("val") for node in nodes):
        if isinstance(value, torch.Tensor):
            count: Any = value.numel()
            size = value.itemsize * ((hint_of(count) or 0) if isinstance(count, torch.SymInt) else count)
            memory = id(value) if value.layout is not torch.strided else value.untyped_storage()._cdata
            found[memory] = max(size, found.get(memory, 0))
    return sum(found.values())


def min_cut(graph: fx.Graph, forward: set[fx.Node], free: set[fx.Node]) -> list[fx.Node]:
    """Returns what to save of a joint graph so that cheap operations recompute the rest of what its backward reads.

    Args:
        graph: placeholders ``primals_*`` and ``tangents_*``, then operations; nodes carry ``meta["val"]``.
        forward: nodes of the forward; the others are the backward.
        free: placeholders that cost nothing to keep.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import MinCutOptions, NodeInfo, solve_min_cut
    from torch.utils._ordered_set import OrderedSet

    nodes = [node for node in graph.nodes if node.op != "output"]
    behind = OrderedSet(node for node in nodes if node not in forward)
    order = {node: i for i, node in enumerate(node for node in nodes if node in forward)}
    for node in reversed(nodes):
        near = min((user.dist_from_bw + 1 for user in node.users if user.op != "output"), default=int(1e9))
        node.dist_from_bw = near if node in forward else 0  # type: ignore[attr-defined]
    options = MinCutOptions(
        ban_if_used_far_apart=config.ban_recompute_used_far_apart,
        ban_if_long_fusible_chains=config.ban_recompute_long_fusible_chains,
        ban_if_materialized_backward=config.ban_recompute_materialized_backward,
        ban_if_not_in_allowlist=config.ban_recompute_not_in_allowlist,
        ban_if_reduction=config.ban_recompute_reductions,
    )
    inputs = [node for node in nodes if node.op == "placeholder" and node in forward]
    info = NodeInfo(inputs, OrderedSet(order), behind, behind, OrderedSet(), order, OrderedSet(free))
    saved, _ = solve_min_cut(graph, info, options)
    return list(saved)
