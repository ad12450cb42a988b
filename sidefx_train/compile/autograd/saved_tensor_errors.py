"""Reproduces eager's errors for changed saved tensors, and the order in which eager checks them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.artifacts import DERIVED, FORWARD
from sidefx_train.compile.graph.fx_utils import schema_args
from sidefx_train.compile.residual.saved_tensor_refs import Shown

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.tracer import GraphTracer

_NODE = re.compile(r"(.*?)Backward\d*$")
_SUFFIX = re.compile(r"Backward0?$|Backward(?=\d+$)")
_CHANGED = re.compile(r"\[([\w.]+) \[[\d, ]*\]\](, which is [^\[]*?,)? is at version \d+; expected version \d+ ")
"""torch's error text for a changed tensor."""


def in_eager_order(reads: list[tuple[fx.Node, list[fx.Node]]], forward: Iterable[fx.Node]) -> list[fx.Node]:
    """Returns the values of the forward that a backward reads.

    An autograd node checks all its saved tensors before it computes anything: arguments in order of their names, then
    results.

    Args:
        reads: nodes of the backward, and what each reads of the forward, in forward order.
        forward: nodes of the forward.
    """
    made_by: dict[str, list[fx.Node]] = {}
    for node in forward:
        if isinstance(node.target, compat.OpOverload):
            made_by.setdefault(_operation(node), []).append(node)
    found: list[fx.Node] = []
    for derived, group in itertools.groupby(reads, key=lambda read: read[0].meta.get(DERIVED)):
        used = list(dict.fromkeys(itertools.chain.from_iterable(each for _, each in group)))
        name = _NODE.match(derived[0]) if derived is not None else None
        makers = made_by.get(_bare(name[1]), []) if name is not None and len(used) > 1 else []
        fitting = [node for node in makers if set(used) <= {node, *node.all_input_nodes}]
        fitting.sort(key=lambda node: node.meta.get(FORWARD) != derived[1])  # type: ignore[index]
        maker = fitting[0] if fitting else None
        if maker is not None:
            names = {value: argument.name for argument, value in schema_args(maker) if isinstance(value, fx.Node)}
            used.sort(key=lambda value: (value not in names, names.get(value, "")))
        found += used
    return found


@dataclass(frozen=True)
class Saved:
    """eager's error text for a value that was changed after it was saved.

    Attributes:
        origin: what made it, as in "output 0 of ExpBackward0"; empty for one without history.
        forbidden: eager's full message for a view that must not be used after its base was changed.
        shown: the program's tensor that eager has saved, if known: the message contains its current sizes.
    """

    origin: str = ""
    forbidden: str = ""
    shown: Shown | None = None


@dataclass(frozen=True)
class SavedCheck:
    """One autograd node of eager's backward, and the saved tensors it checks.

    Attributes:
        saved: indices of inputs of the captured backward.
        tangents: tangents from which it is reached.
        grads: gradients to which it leads.
    """

    saved: frozenset[int]
    tangents: frozenset[int]
    grads: frozenset[int]


def saved_checks(
    reads: list[tuple[fx.Node, list[fx.Node]]], saved: list[fx.Node], tangents: list[fx.Node], grads: list[fx.Node]
) -> tuple[SavedCheck, ...]:
    """Returns the checks of each node; eager skips nodes that no tangent reaches, or that lead to no requested
    gradient.

    Args:
        reads: nodes of the backward, in order, and what each reads of the forward.
        saved: inputs of the backward from the forward.
        tangents: its other inputs.
        grads: its results.
    """
    position = {node: i for i, node in enumerate(saved)}
    reached: dict[fx.Node, frozenset[int]] = {node: frozenset({i}) for i, node in enumerate(tangents)}
    leads: dict[fx.Node, set[int]] = {}
    for i, node in enumerate(grads):
        leads.setdefault(node, set()).add(i)
    for node, _ in reads:
        reached[node] = frozenset().union(*(reached.get(used, frozenset()) for used in node.all_input_nodes))
    for node, _ in reversed(reads):
        for used in node.all_input_nodes:
            leads.setdefault(used, set()).update(leads.get(node, ()))
    found: list[SavedCheck] = []
    for _, members in itertools.groupby(reads, key=lambda read: read[0].meta.get(DERIVED)):
        group = _of_one_node(list(members))
        seen = frozenset(position[value] for _, used in group for value in used if value in position)
        if seen:
            by = frozenset().union(*(reached[node] for node, _ in group))
            found.append(SavedCheck(seen, by, frozenset().union(*(leads.get(node, ()) for node, _ in group))))
    return tuple(found)


def _of_one_node(group: list[tuple[fx.Node, list[fx.Node]]]) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Removes the sums at the end, which the engine computes from results of several nodes."""
    last = len(group)
    while last and not group[last - 1][1] and group[last - 1][0].target is torch.ops.aten.add.Tensor:
        last -= 1
    return group[:last]


def described(tracer: GraphTracer, nodes: Sequence[fx.Node]) -> list[Saved]:
    """Returns eager's error texts for the values of some nodes that the program can still change."""
    wanted = {node: _undetached(node) for node in nodes}
    places = set(wanted.values())
    known: dict[fx.Node, Saved] = {}
    for place, tensor in compat.tracked_pairs(tracer.tracer):
        if place in places and tensor.requires_grad:
            known[place] = _described(tensor) or known.get(place, Saved())
    return [known.get(place, Saved()) for place in wanted.values()]


def _undetached(node: fx.Node) -> fx.Node:
    """Returns the value that a saved value is detached from: the node's own result."""
    while node.target is torch.ops.aten.detach.default:
        (node,) = node.all_input_nodes
    return node


def _described(tensor: torch.Tensor) -> Saved | None:
    """Returns eager's error text for a tensor; ``None`` for one without history, even if it shares storage."""
    creation = compat.creation_of(tensor)
    try:
        made_by, base = tensor.grad_fn, tensor._base
    except RuntimeError:  # it was changed in the step: a backward that needs it was refused
        return None
    if made_by is None:
        return None
    if creation is not None and creation != compat.PLAIN_VIEW:
        return Saved(forbidden=_once_changed(tensor))
    if base is not None and _kind(base) == _kind(tensor):
        return Saved(f"output 0 of {_in_errors('AsStridedBackward0')}")  # autograd regenerates it as that
    return Saved(f"output {tensor.output_nr} of {_in_errors(made_by.name())}")


def _in_errors(node: str) -> str:
    """Returns the name of an autograd node in error messages."""
    return _SUFFIX.sub("", node) if compat.NODES_BY_OPERATION else node


def _once_changed(view: torch.Tensor) -> str:
    """Returns autograd's error for a view whose history cannot be regenerated after its storage was written."""
    version = view._version
    compat.set_version(view, version + 1)
    try:
        view.grad_fn  # noqa: B018
    except RuntimeError as error:
        return str(error)
    finally:
        compat.set_version(view, version)
    return ""


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def saved_as_results(reads: list[tuple[fx.Node, list[fx.Node]]]) -> set[fx.Node]:
    """Returns values saved by the node that made them: unaffected by later metadata mutations."""
    found: set[fx.Node] = set()
    for node, used in reads:
        derived = node.meta.get(DERIVED)
        name = _NODE.match(derived[0]) if derived is not None else None
        if name is not None:
            made_here = (each for each in used if each.meta.get(FORWARD) == derived[1])  # type: ignore[index]
            found |= {each for each in made_here if _operation(each) == _bare(name[1])}
    return found


def in_eagers_words(
    error: RuntimeError, saved: Saved, met: torch.Tensor, expected: int, size: torch.Size, same: bool
) -> str:
    """Returns eager's message in place of torch's message that a saved tensor was changed.

    Args:
        error: torch's error.
        saved: error text of the tensor that eager checks first.
        met: that tensor.
        expected: the version it had.
        size: its current size.
        same: torch's error is about the same tensor.
    """
    if saved.forbidden:
        return saved.forbidden

    def told(said: re.Match[str]) -> str:
        made_by = said[2] if same else _origin_of(met)
        ours = made_by is None or "_CapturedPart" in made_by
        origin = f", which is {saved.origin}," if saved.origin and ours else made_by or ""
        numbers = f"is at version {met._version}; expected version {expected} "
        return f"[{said[1] if same else met.type()} {list(size)}]{origin} {numbers}"

    return _CHANGED.sub(told, str(error), count=1)


def _origin_of(tensor: torch.Tensor) -> str | None:
    made_by = tensor.grad_fn
    return None if made_by is None else f", which is output {tensor.output_nr} of {_in_errors(made_by.name())},"


def _operation(node: fx.Node) -> str:
    """Returns the name of an operation, as shared by operators and autograd nodes."""
    return _bare(node.target._schema.name.split("::")[1]) if isinstance(node.target, compat.OpOverload) else ""


def _bare(name: str) -> str:
    """Returns a name as shared by operators and autograd nodes."""
    return name.replace("_", "").lower()
