"""Batches that a step moves to an accelerator: the runner moves them, and the graph gets them there.

A graph without tensors of the host can be recorded, and a replay copies a batch right to where the graph reads it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.artifacts import TracedGraph
from sidefx_train.compile.graph.devices import accelerator_of, is_on_accelerator
from sidefx_train.compile.graph.fx_utils import copied

aten = torch.ops.aten

Moved = tuple[tuple[int, bool], ...]
"""(position, the host need not wait) of the inputs that the runner moves."""


def move_inputs(traced: TracedGraph) -> tuple[TracedGraph, Moved]:
    """Returns a captured graph whose inputs are on the accelerator if all it does with them is to move them there.

    Args:
        traced: a captured graph; it is not changed.
    """
    device = accelerator_of(traced.module.graph)
    if device is None:
        return traced, ()
    placeholders = [node for node in traced.module.graph.nodes if node.op == "placeholder"]
    found = [i for i, node in enumerate(placeholders) if _is_only_moved(node, device) and _is_batch(traced, i)]
    if not found:
        return traced, ()
    module = copied(traced.module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs, moved = list(traced.inputs), []
    for i in found:
        node = placeholders[i]
        moved.append((i, all(user.kwargs.get("non_blocking", False) for user in node.users)))
        with traced.fake_mode, torch.no_grad():
            was = node.meta["val"]
            value = torch.empty_strided(was.shape, was.stride(), dtype=was.dtype, device=device)
        for user in list(node.users):
            _stay(user, value)
        node.meta = {**node.meta, "val": value}
        inputs[i] = replace(inputs[i], example=value)
    module.recompile()
    return replace(traced, module=module, inputs=tuple(inputs)), tuple(moved)


def _is_batch(traced: TracedGraph, position: int) -> bool:
    """Returns True for a tensor that is fetched at every call, and that shares memory with no other input."""
    given = traced.inputs[position]
    value = given.example
    if given.kind != "tensor" or given.counter is not None or value.device.type != "cpu" or not value.dim():
        return False
    tensors = [each.example for each in traced.inputs if isinstance(each.example, torch.Tensor)]
    return [compat.storage_id(each) for each in tensors].count(compat.storage_id(value)) == 1


def _is_only_moved(node: fx.Node, device: torch.device) -> bool:
    return bool(node.users) and all(
        user.target is aten._to_copy.default
        and user.args == (node,)
        and is_on_accelerator(user.meta["val"])
        and user.meta["val"].device == device
        and user.kwargs.get("memory_format") in (None, torch.preserve_format)
        for user in node.users
    )


def _stay(node: fx.Node, value: torch.Tensor) -> None:
    """Turns a move of an input into a copy on its device."""
    kept: dict[str, Any] = {"dtype": node.kwargs["dtype"]} if node.kwargs.get("dtype") is not None else {}
    if not kept or kept["dtype"] == value.dtype:
        node.target, kept = aten.clone.default, {}
    node.kwargs = kept
