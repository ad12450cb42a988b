"""Steps whose backward runs outside of them: what their forward must not do."""

from __future__ import annotations

from sidefx_train import torch_compat as compat
from sidefx_train.compile.autograd.joint_graph import JointGraph
from sidefx_train.compile.capture.shadows.objects.wrapper_tensors import WrapperRecord
from sidefx_train.compile.capture.shadows.records import LeafRecord
from sidefx_train.compile.capture.world.trace_world import TraceWorld
from sidefx_train.compile.graph.collectives import communicates


def ragged_leaves(world: TraceWorld) -> bool:
    """Returns True if jagged tensors from outside are leaves that require gradients."""
    records = [each for each in world.heap.by_real.values() if isinstance(each, LeafRecord)]
    return any(each.requires_grad and compat.is_jagged(each.real) for each in records)


def refuse_unsupported(world: TraceWorld) -> None:
    """Refuses a forward whose backward cannot be recorded.

    Raises:
        Unsupported: it differentiates tensor subclasses, writes jagged tensors from outside, or runs under a mode.
    """
    _refuse_differentiated_wrappers(world)
    _refuse_written_jagged(world)
    if world.heap.shown.any:
        world.heap.refuse("SFX107", "the backward runs outside of a step that uses tensor subclasses")
    if world.functions.around:
        world.heap.refuse("SFX111", "the backward runs outside of a step inside a TorchFunctionMode")


def _refuse_written_jagged(world: TraceWorld) -> None:
    """Refuses in-place changes of jagged tensors from outside in a forward whose backward runs outside.

    Such a tensor may share its version counter with its values, which are counted as written after the forward has
    saved them.
    """
    for record in world.heap.by_real.values():
        if not isinstance(record, LeafRecord) or not compat.is_jagged(record.real) or record.shadow.is_inference():
            continue
        if record.shadow._version != record.version:
            reason = f"changes {record.source.label}, a nested tensor, in place, and the backward runs outside"
            world.heap.refuse("SFX109", reason)


def _refuse_differentiated_wrappers(world: TraceWorld) -> None:
    """Refuses tensor subclasses in a forward whose backward runs outside."""
    # The parameters of fully_shard are differentiated in their gathered form, which has checks of its own.
    leaves = [
        each.source.label
        for each in world.heap.by_real.values()
        if isinstance(each, LeafRecord) and each.requires_grad
        if (compat.is_jagged(each.real) if isinstance(each, WrapperRecord) else not world.sharded_groups)
    ]
    which = next(filter(None, (world.tracer.proxy_mode.differentiated, *leaves)), None)
    if which is not None:
        world.heap.refuse("SFX107", f"the backward outside of the step passes through tensor subclasses ({which})")


def refuse_collectives(world: TraceWorld, joint: JointGraph) -> None:
    """Refuses collectives outside of the forward of a step whose backward runs outside: the engine decides when."""
    if any(communicates(graph.module.graph) for graph in joint.graphs if graph is not joint.forward):
        world.heap.refuse("SFX103", "calls collectives in a backward that runs outside of the step")
