"""What a recorded backward begins and ends at: outside tensors that get gradients, and what outputs may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.graph.view_chains import own_counter
from sidefx_train.compile.residual.generate import outside_wrappers

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld
    from sidefx_train.compile.graph.step_metadata import InputFacts


def gradient_inputs(world: TraceWorld, inputs: tuple[InputFacts, ...]) -> list[tuple[int, Any]]:
    """Returns (input position, edge to differentiate by) of every input that requires gradients."""
    records = {id(r.real): r for r in world.heap.by_real.values() if isinstance(r, TensorRecord)}
    found: list[tuple[int, Any]] = []
    for facts in inputs:
        record = records[id(world.tracer.real_inputs[facts.position])]
        if facts.leaf and facts.changes_requires_grad and not facts.requires_grad:
            if record.real._is_view():
                world.heap.refuse("SFX107", f"cannot make {facts.label}, a view, require gradients")
            if facts.mutates_metadata or record.shadow.dtype != record.real.dtype:
                world.heap.refuse("SFX107", f"cannot change the shape of {facts.label} and make it require gradients")
            found.append((facts.position, get_gradient_edge(record.shadow)))
            continue
        if not facts.requires_grad:
            continue
        if facts.leaf and facts.changes_requires_grad:  # it ceases to require gradients: its results end at no leaf
            continue
        if facts.leaf and facts.mutates_metadata:
            world.heap.refuse("SFX107", f"{facts.label}, which requires gradients, changes its shape")
        if facts.leaf and facts.updates_history:
            world.heap.refuse("SFX107", f"{facts.label} joins the step's autograd graph")
        if (record.shadow.shape, record.shadow.dtype) != (record.memory.shape, record.memory.dtype):
            world.heap.refuse("SFX107", f"{facts.label}, which requires gradients, gets another shape or dtype")
        if record.edge is not None and _is_out_of_date(record):
            world.heap.refuse(
                "SFX107", f"{facts.label}, which requires gradients, has another shape than in its autograd history"
            )
        found.append((facts.position, record.edge if record.edge is not None else get_gradient_edge(record.shadow)))
    return found


def wrapper_edges(world: TraceWorld) -> list[tuple[int, Any]]:
    """Returns (position, gradient edge) of every wrapper subclass from outside that requires gradients."""
    found: list[tuple[int, Any]] = []
    for i, record in enumerate(outside_wrappers(world)):
        if record.accumulator_hooked or any(compat.hook_numbers(record.shadow)):
            world.heap.refuse("SFX107", f"{record.source.label}, a tensor subclass, has hooks in a backward outside")
        if record.requires_grad:
            found.append((i, GradientEdge(compat.accumulator_of(record.shadow), 0)))
    return found


def input_leaves(world: TraceWorld, inputs: list[tuple[int, Any]]) -> list[tuple[torch.Tensor, Any]]:
    """Returns shadows of leaves, with their gradient edges."""
    records = [world.heap.by_real[id(world.tracer.real_inputs[position])] for position, _ in inputs]
    found = [(record.shadow, edge) for record, (_, edge) in zip(records, inputs, strict=True)]
    return [(shadow, edge) for shadow, edge in found if shadow.grad_fn is None]


def _is_out_of_date(record: TensorRecord) -> bool:
    """Returns True for a tensor whose storage was replaced (``.data =``): its gradients have the old shape."""
    real = record.real
    if real._is_view() or real.grad_fn is None:
        return False
    shape, dtype, _ = compat.output_of(real.grad_fn, real.output_nr)
    return (tuple(shape), dtype) != (tuple(real.shape), real.dtype)


def check_leaves(world: TraceWorld, fakes: list[torch.Tensor], entered: set[Any]) -> None:
    """Refuses gradients of leaves that the step created itself: the captured part gets its leaves as inputs."""
    seen, waiting = set(entered), [fake.grad_fn for fake in fakes]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reason = "the backward of an output reaches a tensor that the step made a leaf or a non-leaf"
            world.heap.refuse("SFX107", reason)
        if not hasattr(node, "variable") and all(before is None for before, _ in node.next_functions):
            reason = "the backward of an output ends at a view of a leaf created with autograd off"
            world.heap.refuse("SFX107", reason)
        waiting += [before for before, _ in node.next_functions]


def check_separate(world: TraceWorld, fakes: list[torch.Tensor]) -> None:
    """Refuses differentiable aliases of each other or of an input: autograd would miss later in-place changes."""
    outside = {compat.storage_id(r.memory) for r in world.heap.by_real.values() if isinstance(r, TensorRecord)}
    taken = set(outside)
    for fake in fakes:
        if compat.is_wrapper(fake):
            continue
        node = world.tracer.node_of(fake)
        if compat.storage_id(fake) in outside and own_counter(node) is node:
            continue  # autograd does not know of it in eager either
        native = world.custom_functions.of(fake)
        if native is not None and native.returned_input(fake) is not None:
            continue  # as in eager, the function's node makes it a view
        if compat.storage_id(fake) in taken:
            world.heap.refuse("SFX107", "cannot return a differentiable view together with its base")
        taken.add(compat.storage_id(fake))


def is_leaf(world: TraceWorld, position: int) -> bool:
    record = world.heap.by_real[id(world.tracer.real_inputs[position])]
    return isinstance(record, TensorRecord) and record.edge is None


def is_quiet(world: TraceWorld, position: int) -> bool:
    """Returns True for a leaf without hooks: it is not observable that the engine reaches it without a gradient."""
    record = world.heap.by_real[id(world.tracer.real_inputs[position])]
    if not isinstance(record, TensorRecord) or record.edge is not None:
        return False
    hooked = any(compat.hooks_of(record.real)) or any(compat.hook_numbers(record.shadow))
    return not hooked and not record.accumulator_hooked
