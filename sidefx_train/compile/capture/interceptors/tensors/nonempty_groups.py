"""Loops over the groups that have members: a sparse mixture of experts goes over those that a token has chosen.

``for expert in (mask.sum((-1, -2)) > 0).nonzero():`` has as many turns as there are such experts, which only the graph
knows. That all are chosen is assumed; the rows are constants then. One-hot vectors may have a class for no expert,
behind those that a ``topk`` chooses from, and no token chooses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.counted_results import with_contents
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

aten = torch.ops.aten

_MOST = 64
"""Limit of groups: each is captured."""
_MOST_NODES = 32
"""Limit of operations between the choice and the loop."""
_COMPARISONS = frozenset({aten.gt, aten.ne, aten.ge})
_COUNTS = frozenset(
    {aten.sum, aten.any, aten.amax, aten.max, aten.bincount, aten.histc, aten.scatter_add, aten.index_add}
)
_VIEWS = frozenset(
    {aten.slice, aten.select, aten.view, aten.reshape, aten.squeeze, aten.unsqueeze, aten.alias, aten.detach}
)


@registry.intercept(torch.Tensor.__iter__)
def _iterate(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (rows,) = args
    if type(rows) is not compat.FakeTensor or not world.tracer.has_node(rows) or not rows.dim():
        return ABSENT
    if type(rows.shape[0]) is not torch.SymInt or not compat.is_unbacked(rows.shape[0]):
        return ABSENT
    chain = _views_of_positions(world.tracer.node_of(rows))
    if chain is None:
        return ABSENT
    chosen = chain[0].args[0]
    assert isinstance(chosen, fx.Node), "the tensor whose positions they are"
    found, count = chain[0].meta["val"], _number_of_choices(chosen)
    if any(map(world.writes.to, (found, chosen.meta["val"]))) or not world.branches.grant_first(chosen, count):
        return ABSENT
    with compat.real_world():
        known = torch.arange(count).unsqueeze(1)
        for node in chain[1:]:
            known = node.target(known, *map(_known_size, node.args[1:]))  # type: ignore[operator]
    constant = with_contents(known)

    def refuse() -> NoReturn:
        world.heap.refuse("SFX107", "keeps a row of the groups that have members")

    world.private_memory[compat.storage_id(constant)] = refuse
    world.unwritten += [(each, len(world.writes.to(each))) for each in (found, constant)]
    return iter(torch.unbind(constant))


def _views_of_positions(node: fx.Node) -> list[fx.Node] | None:
    """Returns the ``nonzero`` of which groups have members, and the views of it that lead to a node; ``None`` for
    another tensor."""
    chain = [node]
    while _packet_of(node) in _VIEWS and safe_isinstance(node.args[0], fx.Node):
        if node.kwargs or not all(map(_is_replayed, node.args[1:])):
            return None
        node = node.args[0]
        chain.insert(0, node)
    if node.target is not aten.nonzero.default:
        return None
    chosen = node.args[0]
    if not isinstance(chosen, fx.Node) or not _is_of_groups(chosen):
        return None
    return chain


def _is_replayed(arg: Any) -> bool:
    if not isinstance(arg, (list, tuple)):
        return not isinstance(arg, fx.Node)
    return sum(isinstance(size, fx.Node) or size == -1 for size in arg) <= 1


def _known_size(arg: Any) -> Any:
    """Returns an argument with the one size that only the graph knows left open."""
    return [-1 if isinstance(size, fx.Node) else size for size in arg] if isinstance(arg, (list, tuple)) else arg


def _is_of_groups(node: fx.Node) -> bool:
    """Returns True for a vector that says of a few groups whether they have members."""
    value = node.meta["val"]
    if value.dtype is not torch.bool or value.dim() != 1 or value.device.type != "cpu":
        return False
    known = type(value.shape[0]) is int and 0 < value.shape[0] <= _MOST
    compared = node.args[0] if _packet_of(node) in _COMPARISONS else node
    return known and isinstance(compared, fx.Node) and _packet_of(compared) in _COUNTS


def _number_of_choices(node: fx.Node) -> int:
    """Returns how many of the groups can have members: as many as a ``topk`` before chooses from, or all."""
    number: int = node.meta["val"].shape[0]
    todo, seen = [node], {node}
    for each in todo:  # grows
        if each.target is aten.topk.default:
            chosen_from = each.args[0].meta["val"]  # type: ignore[union-attr]
            size = chosen_from.shape[each.args[2] if len(each.args) > 2 else -1] if chosen_from.dim() else 1
            return min(number, size) if type(size) is int and size else number
        new = [used for used in each.all_input_nodes if used not in seen]
        seen.update(new)
        todo += new[: _MOST_NODES - len(todo)]
    return number


def _packet_of(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)
