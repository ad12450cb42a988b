"""Functional collectives of a graph: every process must issue the same ones in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.communication import CommunicationRecord
from sidefx_train.compile.graph.fx_utils import written_args
from sidefx_train.errors import UnfinishedError

_MULTIPLYING = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "conv", "lstm", "_scaled_dot", "scaled_dot")
"""Beginnings of the names of operators whose kernels are measured."""


def communicates(graph: fx.Graph) -> bool:
    """Returns True if a graph contains collectives."""
    return any(compat.is_collective(node.target) for node in graph.nodes)


def stopped(error: Exception) -> UnfinishedError:
    """Returns the error of a graph with collectives that stopped: it names the process, as another may be the cause."""
    place = f"in {compat.own_process()}; another process may have failed, or have left the step"
    return UnfinishedError("SFX207", f"{type(error).__name__}: {error} ({place})")


def issued(graph: fx.Graph) -> list[tuple[str, ...]]:
    """Returns name, sizes and other arguments of the collectives that a graph issues, in order."""
    return [
        (name, *(str(arg.meta["val"].shape if isinstance(arg, fx.Node) else arg) for arg in node.args))
        for node in graph.nodes
        if compat.is_collective(node.target) and (name := compat.collective_name(node.target))
    ]


def communication(graph: fx.Graph) -> list[CommunicationRecord]:
    """Returns what the collectives of a graph send and where they start and are waited for, in order."""
    operations = [node for node in graph.nodes if node.op == "call_function"]
    positions = {node: position for position, node in enumerate(operations)}
    return [
        _record(node, positions)
        for node in operations
        if compat.is_collective(node.target) and compat.collective_name(node.target)
    ]


def multiplies_reduced(graph: fx.Graph) -> bool:
    """Returns True if a product, a convolution, an attention or a recurrent layer depends on an all-reduce.

    Every process computes that part, as the replicated layers of a tensor-parallel model, or an optimizer that
    multiplies reduced gradients. The results stay equal only if all of them use the same kernels.
    """
    reduced: set[int] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        from_reduced = any(each in reduced for each in _storages(node.all_input_nodes))
        if from_reduced and str(getattr(node.target, "_opname", "")).startswith(_MULTIPLYING):
            return True
        if from_reduced or (compat.is_collective(node.target) and compat.collective_name(node.target) == "all_reduce"):
            reduced.update(_storages([node, *written_args(node)]))
    return False


def _storages(nodes: Iterable[fx.Node]) -> Iterator[int]:
    """Yields the storages of the tensors that nodes return."""
    for node in nodes:
        value = node.meta.get("val")
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, torch.Tensor):
                yield compat.storage_id(each)


def _record(node: fx.Node, positions: dict[fx.Node, int]) -> CommunicationRecord:
    name, operations = compat.collective_name(node.target), len(positions)
    size, start = compat.size_of_group(str(node.args[-1])), positions[node]
    if name == "barrier":
        return CommunicationRecord(name, "", 0, size, start, start + 1, operations)
    whole = node if name == "all_gather_into_tensor" else node.args[0]
    assert isinstance(whole, fx.Node)
    sent: torch.Tensor = whole.meta["val"]
    elements = sent.numel()
    waits = [positions[user] for user in node.users if compat.is_collective(user.target)]
    return CommunicationRecord(
        name,
        str(sent.dtype).removeprefix("torch."),
        sent.element_size() * (compat.hint_of(elements) if isinstance(elements, torch.SymInt) else elements),
        size,
        start,
        min(waits, default=operations),
        operations,
    )
