"""Metadata of every outside tensor that a step has used, read from the finished capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.capture.side_effects.collect import gets_new_history, history_regenerated
from sidefx_train.compile.graph.artifacts import HIDDEN_FROM_AUTOGRAD
from sidefx_train.compile.graph.step_metadata import InputFacts

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def input_facts(world: TraceWorld) -> tuple[InputFacts, ...]:
    """Returns the facts of every outside tensor that the step has used."""
    position_of = {id(real): i for i, real in enumerate(world.tracer.real_inputs)}
    records = [record for record in world.heap.by_real.values() if isinstance(record, TensorRecord)]
    found = [_facts(world, record, position_of[id(record.real)]) for record in records]
    return tuple(sorted(found, key=lambda facts: facts.position))


def _facts(world: TraceWorld, record: TensorRecord, position: int) -> InputFacts:
    shadow, example = record.memory, world.tracer.inputs[position].example
    writes = [
        node for node in world.writes.to(shadow) if torch.Tag.inplace_view not in getattr(node.target, "tags", ())
    ]
    history = gets_new_history(world, record) or history_regenerated(world, record)
    hidden_from_autograd = [node.meta.get(HIDDEN_FROM_AUTOGRAD) for node in writes]
    return InputFacts(
        position=position,
        label=record.source.label,
        leaf=record.edge is None,
        requires_grad=record.requires_grad,
        mutates_data=bool(writes),
        mutates_metadata=_layout(shadow) != _layout(example) or _layout(record.shadow)[:2] != _layout(example)[:2],
        mutation_hidden=bool(writes) and all(hidden_from_autograd),
        mutation_in_inference="inference" in hidden_from_autograd,
        updates_history=history,
        changes_requires_grad=record.shadow.requires_grad != record.requires_grad and not history,
        resizes_storage=str(shadow.untyped_storage().nbytes()) != record.entry_memory or record.resized,
        replaces_storage=record.new_storage is not None and not record.resized,
    )


def _layout(value: torch.Tensor) -> tuple[object, ...]:
    """Returns sizes as strings: comparing symbols would record an operation and guard its result."""
    return tuple(map(str, value.shape)), tuple(map(str, value.stride())), str(value.storage_offset())
