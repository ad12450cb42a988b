"""Which specialization is tried next, after one with which a step cannot be captured, or its graph not compiled."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.specialization import EXACT_STRINGS, Specialization, passed_on
from sidefx_train.compile.capture.resume.suspension import frames_of
from sidefx_train.compile.capture.world.native_calls.caller_frames import BEYOND
from sidefx_train.compile.capture.world.torch_draws import is_number_draw
from sidefx_train.compile.capture.world.trace_world import TraceWorld
from sidefx_train.compile.graph.artifacts import TracedGraph
from sidefx_train.errors import Unsupported


def after_stop(spec: Specialization, world: TraceWorld, stop: Unsupported) -> Specialization | None:
    """Returns a specialization with which the step may not stop there; ``None`` if none is known."""
    if world.random_draws.of_torch.wanted:
        return replace(spec, reads_draws=True, reads_dependent_draws=spec.reads_draws)
    if world.random_draws.wants_early:
        return replace(spec, early_arrays=spec.early_arrays | world.random_draws.wants_early)
    if not world.heap.unknown_iterators <= spec.native_iterators:
        return replace(spec, native_iterators=spec.native_iterators | world.heap.unknown_iterators)
    if world.heap.identities.needs_appended and spec.picks_appended:
        return replace(spec, picks_appended=False)
    if world.host_reads.wanted:
        return replace(spec, reads_inputs=True)
    if (world.native_backward_wanted or world.left_hooks.wants_native) and not spec.native_backward:
        return replace(spec, native_backward=True)
    sparse = world.tracer.proxy_mode.sparse
    if (sparse.leaves or (sparse.refused and world.interp.stop_at)) and not spec.native_lookups:
        return replace(spec, native_lookups=True)
    if world.branches.endless:
        return replace(spec, endless_branches=spec.endless_branches | world.branches.endless)
    if world.listed:
        return replace(spec, lists_numbers=False)
    if stop.code == "SFX106" and world.deferred_arrays.of_numbers:
        return replace(spec, defers_numbers=False)
    if spec.perhaps_changing:
        return replace(spec, perhaps_changing=frozenset())
    running = {frame.info.code for frame in frames_of(stop)} & world.array_functions
    if not running <= spec.native_array_functions:
        return replace(spec, native_array_functions=spec.native_array_functions | running)
    if stop.defer is not None and stop.defer not in spec.opaque_classes | spec.split_classes:
        return replace(spec, opaque_classes=spec.opaque_classes | {stop.defer})
    if not world.warns <= spec.inlined_code:
        return replace(spec, inlined_code=spec.inlined_code | world.warns)
    deferred = spec.opaque_classes - {BEYOND}
    if stop.code == "SFX106" and deferred:
        opaque, split = spec.opaque_classes - deferred, spec.split_classes | deferred
        return replace(spec, opaque_classes=opaque, split_classes=split)
    passed = world.heap.passed.tuples if stop.code == "SFX106" else {}
    if passed:
        items = tuple(f"{label}[{i}]" for label, length in passed.items() for i in range(length))
        return replace(
            spec,
            symbolic_numbers=spec.symbolic_numbers | set(passed),  # each is read item by item
            string_changes=(*spec.string_changes, *items, *items),
            pass_through_strings=spec.pass_through_strings | set(items),
        )
    if stop.code == "SFX106" and not spec.guards_strings and spec.pass_through_strings:
        often = passed_on(spec.string_changes, EXACT_STRINGS)
        return replace(spec, pass_through_strings=often, guards_strings=True)
    return None


def after_refusal(spec: Specialization, traced: TracedGraph) -> Specialization | None:
    """Returns a specialization with which a backend may compile what it has refused; ``None`` if none is known."""
    nodes = traced.module.graph.nodes
    reads = [node.args[0] for node in nodes if node.target is torch.ops.aten._local_scalar_dense.default]
    if any(map(is_number_draw, reads)) and spec.host_draws and not spec.reads_draws:
        return replace(spec, reads_draws=True)
    if reads and spec.host_reads and not spec.reads_inputs:
        return replace(spec, reads_inputs=True)
    slices = [node for node in nodes if _slices_by_result(node)]
    if reads and not spec.splits_slices and slices:
        return replace(spec, splits_slices=spec.clamps_slices, clamps_slices=not spec.clamps_slices)
    return None


def _slices_by_result(node: fx.Node) -> bool:
    """Returns True for a slice whose bounds only the graph knows."""
    if node.target is not torch.ops.aten.slice.Tensor:
        return False
    bounds = [bound.meta["val"] for bound in node.args[2:4] if isinstance(bound, fx.Node)]
    return any(isinstance(bound, torch.SymInt) and compat.is_unbacked(bound) for bound in bounds)
