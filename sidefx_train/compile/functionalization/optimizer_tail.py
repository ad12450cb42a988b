"""Optimizer tail: removes whole-parameter updates from the end of a captured graph.

A fused optimizer call updates all parameters at once, and usually nothing after it reads them. Then it is not
decomposed: it runs right after the graph, on the real tensors, with the gradients that the graph returned. Step
counters that only the update reads are moved with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.alias_analysis import Aliases
from sidefx_train.compile.graph.fx_utils import written_args

aten = torch.ops.aten

FUSED_NAMES = frozenset(f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))
_LIGHT = frozenset(
    {
        "aten::zero_",
        "aten::_foreach_zero_",
        "aten::_foreach_add_",
        "aten::add_",
        "aten::detach",
        "aten::alias",
    }
)


def is_fused_update(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, compat.OpOverload)
        and node.target._schema.name in FUSED_NAMES
    )


@dataclass(frozen=True)
class Tail:
    """Nodes that run after the graph, in order; empty if the graph must keep its updates."""

    nodes: tuple[fx.Node, ...] = ()
    reason: str = ""


def find_tail(graph: fx.Graph, aliases: Aliases) -> Tail:
    """Returns the fused updates of a graph, with what must move with them, if they can move to the end."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    chosen: set[fx.Node] = {n for n in nodes if is_fused_update(n)}
    if not chosen:
        return Tail()
    written: frozenset[fx.Node] = frozenset()
    read: frozenset[fx.Node] = frozenset()
    for node in nodes:
        if node not in chosen:
            touches = aliases.reads(node) & written or aliases.writes(node) & read
            if not touches:
                continue
            if not isinstance(node.target, compat.OpOverload) or node.target._schema.name not in _LIGHT:
                return Tail(reason=f"{node.target} follows a fused update and depends on it")
            chosen.add(node)
        written |= aliases.writes(node)
        read |= aliases.reads(node)
    _pull_counters(nodes, chosen, aliases)
    for node in chosen:
        gradients = set(gradients_of(node))
        for arg in written_args(node):
            if arg not in gradients and aliases.same[arg].op != "placeholder":
                return Tail(reason="a fused update writes a tensor made inside the step")
    for result in next(iter(reversed(graph.nodes))).all_input_nodes:
        if result in chosen and aliases.same[result].op != "placeholder":
            return Tail(reason="the step returns a result of the update")
    return Tail(tuple(n for n in nodes if n in chosen))


def gradients_of(node: fx.Node) -> list[fx.Node]:
    """Returns the gradients of a fused update, which its schema calls written; only a gradient scale writes them."""
    if not is_fused_update(node):
        return []
    return list(node.args[1] if len(node.args) > 1 else node.kwargs["grads"])  # type: ignore[arg-type]


def _pull_counters(nodes: list[fx.Node], chosen: set[fx.Node], aliases: Aliases) -> None:
    """Adds in-place increments of inputs that nothing outside the tail reads."""
    users: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        for root in aliases.reads(node):
            users.setdefault(root, []).append(node)
    for node in reversed(nodes):
        if node in chosen or node.target not in (aten._foreach_add_.Scalar, aten.add_.Tensor):
            continue
        if any(not isinstance(a, (int, float)) for a in node.args[1:]) or node.users:
            continue
        roots = frozenset().union(*(aliases.roots[a] for a in written_args(node)))
        others = [u for r in roots for u in users[r] if u is not node]
        if others and all(u in chosen for u in others) and all(r.op == "placeholder" for r in roots):
            chosen.add(node)
