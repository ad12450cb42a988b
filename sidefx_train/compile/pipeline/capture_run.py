"""Runs a step once on shadows, with one specialization: graph, effects and guards, as a :class:`Captured`.

Nothing outside is changed. A run may also return another specialization to try, or where a native rest of the step
begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.autograd.extract_graphs import extract_graphs
from sidefx_train.compile.autograd.joint_graph import JointGraph
from sidefx_train.compile.autograd.trace_backward import record_backward
from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.capture.interpreter.interpreter import Suspended
from sidefx_train.compile.capture.recording.size_asserts import assert_sizes
from sidefx_train.compile.capture.recording.tracer import GraphTracer
from sidefx_train.compile.capture.resume.resume_function import given_names, is_continuation, loop_variables
from sidefx_train.compile.capture.resume.statements import DataCalls
from sidefx_train.compile.capture.resume.suspension import StopPoint, Suspension, frames_of, stop_points, suspend
from sidefx_train.compile.capture.shadows.containers.iterators import given_state
from sidefx_train.compile.capture.shadows.objects.leaf_hooks import guard_accumulation_hooks
from sidefx_train.compile.capture.shadows.passed_values import holds_passed_items
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.capture.side_effects.collect import bases_wanted, collect
from sidefx_train.compile.capture.side_effects.effect import SideEffects
from sidefx_train.compile.capture.world.native_call_facts import first_line
from sidefx_train.compile.capture.world.native_calls import cpp_warnings
from sidefx_train.compile.capture.world.trace_world import TraceWorld
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.trace_rules import describe
from sidefx_train.compile.common.user_code import definition_of
from sidefx_train.compile.graph.artifacts import TracedGraph
from sidefx_train.compile.graph.collectives import communicates
from sidefx_train.compile.graph.fx_utils import generators, one_generator
from sidefx_train.compile.graph.validation import check_traced
from sidefx_train.compile.pipeline import next_specialization
from sidefx_train.compile.pipeline.captured import CaptureBroke, Captured, CaptureFailed
from sidefx_train.compile.pipeline.guard_collection import (
    all_guards,
    changed_sources,
    separate_objects,
    stop_guard,
    symbols,
)
from sidefx_train.compile.pipeline.left_modes import Modes
from sidefx_train.compile.pipeline.outside_backward import ragged_leaves, refuse_collectives, refuse_unsupported
from sidefx_train.compile.pipeline.step_invariants import counters, first_self_invalidated, replaced_tensors
from sidefx_train.compile.residual.generate import Residual, plan
from sidefx_train.errors import BackendError, Unsupported

_DATA_CALLS = DataCalls(
    torch.Tensor, trace_rules.DATA_METHODS, trace_rules.GATHERS, trace_rules.GATHER_METHODS, holds_passed_items
)
_MAX_POINTS = 6
"""Limit of instructions before which suspending a stopped capture is tried."""


@dataclass(frozen=True)
class _Traced:
    """What a run of the interpreter recorded.

    Attributes:
        graph: the whole graph, or the forward of ``joint``.
        residual: how results and effects are rebuilt.
        effects: what the step changed.
        guards: what the graph relies on.
        joint: forward and backward, if autograd outside differentiates the results.
        suspension: where the interpreter stopped, for a part of the step.
        self_invalidated: the first guard that the step's own effects make fail, described; empty if there is none.
    """

    graph: TracedGraph
    residual: Residual
    effects: SideEffects
    guards: list[Guard]
    joint: JointGraph | None
    suspension: Suspension | None
    self_invalidated: str


class CaptureRun:
    """One run of a step on shadows, with one specialization.

    Attributes:
        fn: the step, with its real ``args`` and ``kwargs``; they are not changed.
        name: for generated code.
        spec: specialization of this run.
        point: where to stop, for the part of the step before it.
        in_order: gradients with outside contributions must be added in eager's order.
        tracer: records the graph.
        world: the program as the interpreter sees it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        spec: Specialization,
        point: StopPoint | None,
        in_order: bool,
    ) -> None:
        self.fn, self.args, self.kwargs = fn, args, kwargs
        self.name, self.spec, self.point, self.in_order = name, spec, point, in_order
        self.state_check = compat.GlobalState()
        self.tracer = GraphTracer()
        self.world = TraceWorld(self.tracer, spec, is_continuation(fn), point)
        self.tracer.locate = self.world.locate

    def run(self) -> Captured | Specialization | StopPoint:
        """Returns the capture, or another specialization to try, or where a native rest of the step begins.

        Raises:
            CaptureFailed: the step cannot be captured.
            CaptureBroke: any other exception came out of the run.
        """
        began = time.perf_counter()
        refused: Unsupported | None = None
        raised: Exception | None = None
        broken: Exception | None = None
        points: tuple[StopPoint, ...] = ()
        world = self.world
        try:
            with self.tracer.active(), compat.restoring_state(), world.ending():
                traced = self._trace()
        except Unsupported as stop:
            other = next_specialization.after_stop(self.spec, world, stop)
            if other is not None:
                return other
            points, refused = self._stop_points(stop), stop
        except (CaptureFailed, BackendError):
            raise
        except Exception as error:
            if world.last_error is None or world.last_error[0] is not error:
                broken = error
            else:
                _, fn, where = world.last_error
                why = f"{describe(fn)} raised {type(error).__name__} during the capture: {first_line(error)}"
                raised = error
        finally:
            compat.forget_reals(self.tracer.fake_mode)
            compat.forget_old_sources()
            world.last_error = None  # its traceback holds the callers' frames, and the world may live on for a while
        if raised is not None:  # not in the handler: guards see what is being handled
            try:
                holds = stop_guard(world, self.args, self.kwargs)
                raise CaptureFailed("SFX102", why, where, holds, raised=True) from raised
            finally:
                del raised  # its traceback refers to this frame
        if broken is not None:
            holds = None
            try:
                with suppress(Exception):  # what is broken may be what the guard asks; each call tries again then
                    holds = stop_guard(world, self.args, self.kwargs)
                raise CaptureBroke(holds) from broken
            finally:
                del broken
        if refused is not None:
            try:
                raise self._failure(refused, points) from refused
            finally:
                del refused  # its traceback refers to this frame
        return self._captured(traced, time.perf_counter() - began) if isinstance(traced, _Traced) else traced

    def _trace(self) -> _Traced | Specialization | StopPoint:
        """Runs the step and collects what it recorded, as :meth:`run` returns it."""
        world, spec = self.world, self.spec
        returned, suspension = self._interpret()
        wanted = bases_wanted(world)
        if wanted:
            return replace(spec, views_needing_base=spec.views_needing_base | wanted)
        guard_accumulation_hooks(world.heap)
        effects = collect(world)
        world.heap.check_arrays(world.writes)
        cpp_warnings.check(world)
        counted = counters(world, effects) - spec.symbolic_numbers  # infinity stays a constant
        if counted:
            return replace(spec, symbolic_numbers=spec.symbolic_numbers | counted)
        if spec.separates_aliases and not world.heap.aliased.settle(changed_sources(world, effects)):
            return replace(spec, separates_aliases=False, aliases_matter=True)
        replaced = replaced_tensors(world, effects) - spec.refetched
        if replaced:
            return replace(spec, refetched=spec.refetched | replaced)
        if self.point is None and spec.native_rest:
            rest = world.decisions.rest(world.heap.is_part)
            if rest is not None:
                return rest
        for guard in separate_objects(world, effects):
            world.heap.guards.setdefault((guard.kind, id(guard.source), guard.value), guard)
        return self._extract(returned, suspension, effects)

    def _interpret(self) -> tuple[Any, Suspension | None]:
        """Runs the step, and returns what it returns, or what is needed to continue from where it is to stop."""
        world, point = self.world, self.point
        suspension = None
        modes = Modes.now()
        target, shadows, named = self._arguments()
        world.functions.begin()
        world.interp.stop_at = point.count if point is not None else 0
        try:
            returned = world.interp.run(target, shadows, named)
        except Suspended as reached:
            assert point is not None, "only a point to stop at suspends a step"
            suspension, returned = _suspend(world, reached, point)
        if point is not None and suspension is None:
            raise CaptureFailed("SFX204", "the step took another path the second time", point.location, None)
        if world.modes.entered:
            world.heap.refuse("SFX111", "stops inside a TorchDispatchMode")
        world.caches.check_written()
        world.functions.check_left()
        world.functions.check_around(point is not None or world.heap.is_part)
        modes.keep(world, self.state_check)
        world.locks.settle()
        world.context.settle()
        if self.tracer.stop is not None:
            raise self.tracer.stop
        world.at_end()
        world.heap.memory.finish()
        return returned, suspension

    def _arguments(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Returns the shadows of the step, its positional and its keyword arguments."""
        fn, args, heap = self.fn, self.args, self.world.heap
        self.world.defined_at, heap.sources.parameters = definition_of(fn)
        target = heap.shadow(fn, heap.sources.const(fn, self.name))
        if heap.is_part:
            shadows = given_state(heap, args[0], given_names(fn), loop_variables(fn))
        else:
            shadows = heap.shadows(args)
        named = {key: heap.shadow(value, heap.sources.kwarg(key), key) for key, value in self.kwargs.items()}
        return target, shadows, named

    def _extract(self, returned: Any, suspension: Suspension | None, effects: SideEffects) -> _Traced | Specialization:
        """Plans the residual, and records the backward if autograd outside needs one."""
        world = self.world

        def planned() -> Residual:
            names, suspended = tuple(self.kwargs), suspension is not None
            return plan(world, self.name, all_guards(world), effects, returned, len(self.args), names, suspended)

        residual, joint = planned(), None
        _refuse_written_copies(world)
        if self.spec.native_backward:
            results = residual.histories
            hooks = [*world.left_hooks.of_step(results), *world.custom_functions.choose(results)]
            if hooks or world.custom_functions.native:
                effects = replace(effects, calls=[*hooks, *effects.calls])
                residual = planned()
        has_collectives = communicates(self.tracer.graph)
        if world.assumptions and (residual.differentiates or has_collectives):
            return replace(self.spec, assumes_nothing=True)  # a split graph, or one that cannot run again
        if residual.differentiates:
            if not self.spec.passes_ragged_gradients and ragged_leaves(world):
                return replace(self.spec, passes_ragged_gradients=True)
            refuse_unsupported(world)
            _count_writes(world)  # those of the forward: the backward counts its own when it runs
            world.random_draws.end()
            world.host_reads.end()
            with world.interp.calling_back():
                recorded = record_backward(world, residual, self.in_order)
            residual = planned()  # Python code in the backward may have read more
            joint = extract_graphs(world, residual, recorded)
            if has_collectives:
                refuse_collectives(world, joint)
        guards = all_guards(world)
        self_invalidated = first_self_invalidated(world, guards, effects)
        if joint is None:
            _count_writes(world)
            asserts_sizes = assert_sizes(self.tracer)
            graph = replace(self.tracer.finish(list(residual.outputs)), asserts_sizes=asserts_sizes)
        else:
            graph = joint.forward
        with compat.real_world():
            made = _made_generators(world, graph)
            created = tuple((generator, generator.get_state()) for generator in made)
            for generator, state in created:
                if (seed := world.random_draws.seed_of(generator)) is not None:
                    seed.state = state
        graph = replace(graph, created_generators=created)
        joint = None if joint is None else replace(joint, forward=graph)
        return _Traced(graph, residual, effects, guards, joint, suspension, self_invalidated)

    def _captured(self, traced: _Traced, seconds: float) -> Captured:
        joint, world = traced.joint, self.world
        check_traced("capture", *((traced.graph,) if joint is None else joint.graphs))
        return Captured(
            self.name,
            traced.graph,
            traced.residual.without_trace(),
            tuple(traced.guards),
            tuple(traced.effects.describe()),
            self.state_check,
            tuple(world.pending_state),
            replace(self.spec, graph_decisions=self.spec.graph_decisions | world.decisions.of_graph),
            seconds,
            traced.suspension,
            None if joint is None else joint.without_trace(),
            bool(world.heap.sizes),
            tuple(world.heap.iterators),
            symbols(world)[0],
            traced.self_invalidated,
            tuple(world.assumptions),
            world.random_draws.finish(),
        )

    def _stop_points(self, stop: Unsupported) -> tuple[StopPoint, ...]:
        """Returns where the part before the stop may end, if this run is of the whole step."""
        if self.point is not None or stop.whole:
            return ()
        of_data = stop.code in ("SFX106", "SFX114") and self.spec.items_of_any_class | self.spec.unbounded_lists
        of_arrays = stop.code == "SFX104"
        data = _DATA_CALLS._replace(of_arrays=of_arrays) if of_data or of_arrays else None
        points = stop_points(stop, stop.code, stop.reason, stop.location, data)
        points = points[:_MAX_POINTS]
        if not self.spec.native_rest:
            return points
        return (*self.world.decisions.stopped(frames_of(stop), stop), *points)

    def _failure(self, stop: Unsupported, points: tuple[StopPoint, ...]) -> CaptureFailed:
        """Returns the error of a step that cannot be captured, with the guard that says how long that holds."""
        holds = None
        if stop.code == "SFX115":  # guards must not keep alive what must be finalized
            self.world.heap.forget()
        else:
            holds = stop_guard(self.world, self.args, self.kwargs)
        return CaptureFailed(stop.code, stop.reason, stop.location, holds, points=points)


def _refuse_written_copies(world: TraceWorld) -> None:
    """Refuses to write to what a constant stands for, and to the constant: they share no memory."""
    if any(len(world.writes.to(each)) > known for each, known in world.unwritten):
        world.heap.refuse("SFX107", "writes to the positions of the groups that have members, after a loop over them")


def _made_generators(world: TraceWorld, traced: TracedGraph) -> list[torch.Generator]:
    """Returns the random generators that the step creates and draws from."""
    held = generators(traced.module)
    if not held:
        return []
    known = [record.real for record in world.heap.by_real.values() if type(record.real) is torch.Generator]
    return [each for each in held if not any(one_generator(each, outside) for outside in known)]


def _suspend(world: TraceWorld, reached: Suspended, point: StopPoint) -> tuple[Suspension, tuple[Any, ...]]:
    """Returns what is needed to continue from where the interpreter was stopped."""
    if len(reached.frames) != point.depth:
        world.heap.refuse("SFX204", "the step took another path the second time")
    return suspend(reached.frames, reached.handled, point, world.watched)


def _count_writes(world: TraceWorld) -> None:
    """Records by how much the step increments the version counters of its inputs."""
    inputs, position = world.tracer.inputs, {id(real): i for i, real in enumerate(world.tracer.real_inputs)}
    counted: dict[int, list[TensorRecord]] = {}
    for record in world.heap.by_real.values():
        if isinstance(record, TensorRecord) and not record.shadow.is_inference():
            writes = record.version - record.entry_version
            in_storage = counted.setdefault(compat.storage_address(record.real), []) if writes else []
            first = _same_counter(record, in_storage)
            if writes and first is None:
                in_storage.append(record)
                writes -= sum(n for base, n in world.replayed if compat.share_version_counter(record.shadow, base))
            i = position[id(record.real)]
            counter = None if first is None else position[id(first.real)]
            inputs[i] = replace(inputs[i], writes=writes, counter=counter)


def _same_counter(record: TensorRecord, in_storage: list[TensorRecord]) -> TensorRecord | None:
    """Returns the record with the same version counter: one is a view of the other, or both of a third."""
    return next((other for other in in_storage if compat.share_version_counter(record.shadow, other.shadow)), None)
