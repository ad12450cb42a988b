"""Runs the stages of the compiler in order.

    capture (capture/)      the step runs once on shadows: graph, effects, guards
    residual (residual/)    guards, prologue and epilogue as generated source
    backend (functionalization/, backend/)  the graph becomes a callable
    link                    the generated function is bound to the callable: an Entry

A capture that stops is repeated up to the instruction that stopped it (capture/resume/): the graph so far is compiled
the same way, and its entry continues natively and with further parts.

Every stage passes a plain value to the next; none imports another's internals. Nothing outside is changed before the
first run of an :class:`Entry`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.autograd.compiled_function import join
from sidefx_train.compile.autograd.extract_graphs import extract_graphs
from sidefx_train.compile.autograd.min_cut_partition import recompute
from sidefx_train.compile.autograd.trace_backward import record_backward
from sidefx_train.compile.backend.compile_graph import build, build_casting, is_functionalized_again, reference
from sidefx_train.compile.backend.runners.reset_generators import with_generator_reset
from sidefx_train.compile.backend.verification.first_runs import Proving, Verdict, verified
from sidefx_train.compile.backend.verification.reference import Reference
from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.guards.native_check import object_check, split
from sidefx_train.compile.capture.guards.python_check import tensor_check, write_guards
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.capture.guards.symbol_guards import number_conditions
from sidefx_train.compile.capture.interpreter.interpreter import Suspended
from sidefx_train.compile.capture.recording.size_asserts import assert_sizes
from sidefx_train.compile.capture.recording.tracer import GraphTracer
from sidefx_train.compile.capture.resume.driver import Frames, driven
from sidefx_train.compile.capture.resume.resume_function import given_names, is_continuation
from sidefx_train.compile.capture.resume.suspension import StopPoint, Suspension, frames_of, stop_points, suspend
from sidefx_train.compile.capture.shadows.containers.iterators import given_state
from sidefx_train.compile.capture.shadows.objects.tensors import guard_accumulation_hooks
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.capture.side_effects.collect import bases_wanted, collect
from sidefx_train.compile.capture.world.native_call_facts import first_line
from sidefx_train.compile.capture.world.native_calls.caller_frames import BEYOND
from sidefx_train.compile.capture.world.trace_world import TraceWorld
from sidefx_train.compile.common.generated_code import compile_function
from sidefx_train.compile.common.trace_rules import describe
from sidefx_train.compile.common.user_code import definition_of
from sidefx_train.compile.graph.artifacts import Executable, TracedGraph
from sidefx_train.compile.graph.collectives import communicates
from sidefx_train.compile.graph.fx_utils import generators, one_generator
from sidefx_train.compile.graph.validation import check_graph
from sidefx_train.compile.pipeline.captured import Captured, CaptureFailed
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.pipeline.guard_collection import all_guards, separate_objects, stop_guard, symbols
from sidefx_train.compile.pipeline.run_context import Call, RunContext
from sidefx_train.compile.pipeline.step_invariants import counters, first_self_invalidated
from sidefx_train.compile.residual.generate import MISS, Residual, link, plan
from sidefx_train.config import CompileConfig
from sidefx_train.errors import BackendError, Unsupported

_MAX_RESTARTS = 5
_MAX_DEPTHS = 3
"""Limit of frames, from the innermost outwards, in which suspending a stopped capture is tried."""


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    spec: Specialization,
    in_parts: bool = True,
    in_order: bool = False,
) -> Captured:
    """Runs a step once on shadows.

    Args:
        fn: the step.
        args: its real positional arguments; they are not changed.
        kwargs: its keyword arguments.
        name: for generated code.
        spec: specialization from earlier calls.
        in_parts: if the whole step cannot be captured, capture the part before the instruction that stops it.
        in_order: gradients with outside contributions must be added in eager's order.

    Raises:
        CaptureFailed: the step cannot be captured; nothing outside was changed.
    """

    def once(known: Specialization, point: StopPoint | None) -> Captured | Specialization | StopPoint:
        return _capture_once(fn, args, kwargs, name, known, point, in_order)

    if torch.cuda.is_initialized():
        with compat.outside_tracing():
            compat.settle_cuda()
    try:
        return _attempt(once, spec, None)
    except CaptureFailed as error:
        stop = error
    # Not in the handler: the handled exception that the step sees must be its callers'.
    try:
        if not stop.raised:
            for point in stop.points if in_parts else (each for each in stop.points if each.native):
                try:
                    return _attempt(once, spec, point)
                except CaptureFailed as again:
                    stop.without_break = stop.without_break or again.reason
                    if again.code == "SFX107":  # autograd cannot be split there, nor further out
                        break
        raise stop
    finally:
        del stop  # its traceback holds this frame, and what all callers hold


_Once = Callable[[Specialization, StopPoint | None], Captured | Specialization | StopPoint]


def _attempt(once: _Once, spec: Specialization, point: StopPoint | None) -> Captured:
    """Captures a step, up to ``point`` if that is given, with the specialization that it turns out to need."""
    for _ in range(_MAX_RESTARTS):
        outcome = once(spec, point)
        if isinstance(outcome, Captured):
            return outcome
        if isinstance(outcome, StopPoint):
            captured = _before_rest(once, spec, outcome)
            if captured is not None:
                return captured
            outcome = replace(spec, native_rest=False)
        spec = outcome
    raise CaptureFailed("SFX204", "every attempt changed the specialization of the step", None, None)


def _before_rest(once: _Once, spec: Specialization, rest: StopPoint) -> Captured | None:
    """Captures a step up to its native rest; returns ``None`` if it cannot be suspended there."""
    try:
        return _attempt(once, spec, rest)
    except CaptureFailed:
        return None


def _capture_once(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    spec: Specialization,
    point: StopPoint | None,
    in_order: bool,
) -> Captured | Specialization | StopPoint:
    """Returns a capture, or another specialization to try, or where a native rest of the step begins."""
    began = time.perf_counter()
    state_check = compat.GlobalState()
    tracer = GraphTracer()
    world = TraceWorld(tracer, spec, is_continuation(fn), point)
    tracer.locate = world.locate
    suspension: Suspension | None = None
    refused: Unsupported | None = None
    try:
        with tracer.active(), compat.restoring_state(), world.ending():
            heap = world.heap
            grad_mode = torch.is_grad_enabled()
            world.defined_at, heap.sources.parameters = definition_of(fn)
            target = heap.shadow(fn, heap.sources.const(fn, name))
            shadows = given_state(heap, args[0], given_names(fn)) if heap.is_part else heap.shadows(args)
            named = {key: heap.shadow(value, heap.sources.kwarg(key), key) for key, value in kwargs.items()}
            world.interp.stop_at = point.count if point is not None else 0
            try:
                returned = world.interp.run(target, shadows, named)
            except Suspended as reached:
                assert point is not None, "only a point to stop at suspends a step"
                suspension, returned = _suspend(world, reached, point)
            if point is not None and suspension is None:
                raise CaptureFailed("SFX204", "the step took another path the second time", point.location, None)
            _keep_grad_mode(world, state_check, grad_mode)
            world.locks.settle()
            world.context.settle()
            if tracer.stop is not None:
                raise tracer.stop
            world.at_end()
            heap.memory.finish()
            wanted = bases_wanted(world)
            if wanted:
                return replace(spec, views_needing_base=spec.views_needing_base | wanted)
            guard_accumulation_hooks(heap)
            effects = collect(world)
            heap.check_arrays(world.writes)
            counted = counters(world, effects)
            if counted:
                return replace(spec, symbolic_numbers=spec.symbolic_numbers | counted)
            if point is None and spec.native_rest:
                rest = world.decisions.rest(spec.graph_decisions, heap.is_part)
                if rest is not None:
                    return rest

            def planned() -> Residual:
                suspended = suspension is not None
                return plan(world, name, all_guards(world), effects, returned, len(args), tuple(kwargs), suspended)

            for guard in separate_objects(world, effects):
                world.heap.guards.setdefault((guard.kind, id(guard.source), guard.value), guard)
            residual, joint = planned(), None
            talks = communicates(tracer.graph)
            if world.assumptions and (residual.metadata.tangents or talks):
                return replace(spec, assumes_nothing=True)  # a split graph, or one that cannot run again
            if residual.metadata.tangents and talks:
                world.heap.refuse("SFX103", "calls collectives in a step whose backward runs outside of it")
            if residual.metadata.tangents:
                _count_writes(world)  # those of the forward: the backward counts its own when it runs
                world.random_draws.end()
                recorded = record_backward(world, residual, in_order)
                residual = planned()  # Python code in the backward may have read more
                joint = extract_graphs(world, residual, recorded)
            guards = all_guards(world)
            self_invalidated = first_self_invalidated(world, guards, effects)
            if joint is None:
                _count_writes(world)
                asserts_sizes = assert_sizes(tracer)
                traced = replace(tracer.finish(list(residual.outputs)), asserts_sizes=asserts_sizes)
            else:
                traced = joint.forward
            with compat.real_world():
                made = _made_generators(world, traced)
    except Unsupported as stop:
        if world.random_draws.wanted:
            return replace(spec, reads_draws=True)
        if stop.defer is not None and stop.defer not in spec.opaque_classes | spec.split_classes:
            return replace(spec, opaque_classes=spec.opaque_classes | {stop.defer})
        if not world.warns <= spec.inlined_code:
            return replace(spec, inlined_code=spec.inlined_code | world.warns)
        deferred = spec.opaque_classes - {BEYOND}
        if stop.code == "SFX106" and deferred:
            return replace(
                spec,
                opaque_classes=spec.opaque_classes - deferred,
                split_classes=spec.split_classes | deferred,
            )
        if stop.code == "SFX106" and spec.pass_through_strings:
            return replace(spec, pass_through_strings=frozenset(), guards_strings=True)
        parts = point is None and not stop.whole
        points = stop_points(stop, stop.code, stop.reason, stop.location)[:_MAX_DEPTHS] if parts else ()
        if parts and spec.native_rest:
            points = (*world.decisions.stopped(frames_of(stop), stop), *points)
        refused = stop
    except Exception as error:
        if world.last_error is None or world.last_error[0] is not error:
            raise
        _, fn, location = world.last_error
        reason = f"{describe(fn)} raised {type(error).__name__} during the capture: {first_line(error)}"
        raise CaptureFailed("SFX102", reason, location, None, raised=True) from error
    finally:
        compat.forget_reals(tracer.fake_mode)
        compat.forget_old_sources()
        world.last_error = None  # its traceback refers to the callers' frames, and the world may live on for a while
    if refused is not None:  # not in the handler: guards see what is being handled
        try:
            holds = None
            if refused.code == "SFX115":  # guards must not keep alive what must be finalized
                world.heap.forget()
            else:
                holds = stop_guard(world, args, kwargs)
            raise CaptureFailed(refused.code, refused.reason, refused.location, holds, points=points) from refused
        finally:
            del refused  # its traceback refers to this frame
    traced = replace(traced, created_generators=tuple((generator, generator.get_state()) for generator in made))
    joint = None if joint is None else replace(joint, forward=traced)
    _check_traced("capture", *((traced,) if joint is None else joint.graphs))
    seconds = time.perf_counter() - began
    commits = tuple(world.pending_state)
    spec = replace(spec, graph_decisions=spec.graph_decisions | world.decisions.of_graph)
    return Captured(
        name,
        traced,
        residual,
        tuple(guards),
        tuple(effects.describe()),
        state_check,
        commits,
        spec,
        seconds,
        suspension,
        joint,
        bool(world.heap.sizes),
        tuple(world.heap.iterators),
        symbols(world)[0],
        self_invalidated,
        tuple(world.assumptions),
        world.random_draws.finish(),
    )


def _made_generators(world: TraceWorld, traced: TracedGraph) -> list[torch.Generator]:
    """Returns the random generators that the step creates and draws from."""
    held = generators(traced.module)
    if not held:
        return []
    known = [record.real for record in world.heap.by_real.values() if type(record.real) is torch.Generator]
    return [each for each in held if not any(one_generator(each, outside) for outside in known)]


def _check_traced(stage: str, *graphs: TracedGraph) -> None:
    for traced in graphs:
        names = [given.name for given in traced.inputs]
        check_graph(stage, traced.module, traced.fake_mode, names, [given.example for given in traced.inputs])


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


def _keep_grad_mode(world: TraceWorld, before: compat.GlobalState, grad_mode: bool) -> None:
    """Keeps a grad mode that the step, or the part so far, sets, as an effect; refuses other settings."""
    now = torch.is_grad_enabled()
    torch.set_grad_enabled(grad_mode)
    changed = before.changed_settings()
    if changed:
        reason = f"leaves a global setting of torch changed (autocast, determinism, default dtype...): {changed[0]}"
        world.heap.refuse("SFX111", reason)
    torch.set_grad_enabled(now)
    if now != grad_mode:
        world.defer(compat.set_grad_enabled, (now,), {})


def partitioned(captured: Captured, config: CompileConfig) -> Captured:
    """Returns the capture with less saved for its backward, if it has one and ``config.partition`` allows it."""
    if captured.joint is None or config.partition == "default":
        return captured
    joint = recompute(captured.joint)
    _check_traced("partition", *joint.graphs)
    return replace(captured, joint=joint, traced=joint.forward)


def compile_captured(captured: Captured, config: CompileConfig, context: RunContext, call: Call) -> Entry:
    """Compiles the graph, commits state made early, and binds the generated function.

    Args:
        captured: the capture.
        config: options.
        context: what the entry refers to when it runs.
        call: the captured call; tensor guards compare with the state of its arguments.

    Raises:
        BackendError: the backend failed; nothing outside was changed.
    """
    executable = compile_graphs(captured, config, build, context.differs)
    for commit, _ in captured.commits:
        commit()
    return bind(captured, executable, guard_checks(captured, call), context)


def compile_graphs(
    captured: Captured,
    config: CompileConfig,
    compiler: Callable[[TracedGraph, CompileConfig], Executable],
    differs: Callable[[str], None],
    verdict: Verdict | None = None,
) -> Executable:
    """Compiles the captured graph, and joins it with its backward if autograd outside needs that.

    Args:
        captured: the capture.
        config: options.
        compiler: compiles one graph.
        differs: called with a description if a compiled graph is found wrong.
        verdict: result of an earlier comparison of the graph, or of its forward.
    """
    found: list[str] = []

    def compiled(traced: TracedGraph, what: str = "", known: Verdict | None = None) -> Executable:
        executable = with_generator_reset(compiler(traced, config), traced)
        tell = _named(what, differs), _named(what, found.append)
        return _verified(executable, traced, config, *tell, known)

    with compat.default_device_cpu():  # for tensors that are created in between
        if captured.joint is None:
            return replace(compiled(captured.traced, "", verdict), verification=found)
        executable = compiled(captured.traced, "forward: ", verdict)
        backwards = [compiled(stage.backward, "backward: ") for stage in captured.joint.stages]
    one_by_one = config.backend in ("eager", "aot_eager")
    casting = [build_casting(stage.backward) if one_by_one else None for stage in captured.joint.stages]
    joined = join(captured.joint, executable, backwards, casting)
    conditions = [condition for each in (executable, *backwards) for condition in each.conditions]
    return replace(joined, conditions=tuple(conditions), verification=found)


def _named(what: str, tell: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: tell(what + text)


def _verified(
    executable: Executable,
    traced: TracedGraph,
    config: CompileConfig,
    differs: Callable[[str], None],
    done: Callable[[str], None],
    verdict: Verdict | None = None,
) -> Executable:
    """Returns the executable, which verifies itself at its first run if ``config`` requests that."""
    if not _proves(config):
        return executable
    runs = None if config.verify == "first" else config.verify

    def made() -> Reference | None:
        return reference(traced, config, executable.functional.pop() if executable.functional else None)

    costly = is_functionalized_again(traced, config)
    return verified(executable, traced, made, runs, differs, done, verdict, costly)


def _proves(config: CompileConfig) -> bool:
    """Returns True if compiled graphs are compared."""
    by_default = config.verify == "first"
    return config.verify != 0 and config.backend != "eager" and not (by_default and config.backend == "aot_eager")


def proving(
    traced: TracedGraph, config: CompileConfig, compiler: Callable[[TracedGraph, CompileConfig], Executable | None]
) -> Proving | None:
    """Returns the comparison of a compiled graph, to run elsewhere (:attr:`Proving.compare`); ``None`` if not
    needed."""
    executable = compiler(traced, config) if _proves(config) else None
    if executable is None:
        return None
    run = _verified(with_generator_reset(executable, traced), traced, config, _unheard, _unheard).run
    return run if isinstance(run, Proving) else None


def _unheard(text: str) -> None:
    """Ignores the description: the verdict contains it."""


def fetched(captured: Captured, checks: dict[str, Any], call: Call) -> list[Any] | None:
    """Returns the inputs of a captured graph for a call; ``None`` if a guard fails."""
    found = captured.fetcher(checks)(*call)
    return None if found is MISS else found


def guard_checks(captured: Captured, call: Call) -> dict[str, Any]:
    """Returns the functions that generated code calls to check guards; tensors are compared with their current
    state."""
    held, others = split(list(captured.guards))
    return {
        "check_objects": object_check(held),
        "check_tensors": tensor_check(others, lambda source: source.fetch(*call)),
        "check_state": captured.state_check.check,
    }


def bind(captured: Captured, executable: Executable, checks: dict[str, Any], context: RunContext) -> Entry:
    """Returns an entry with the generated function over a compiled graph.

    Args:
        captured: the capture.
        executable: its compiled graph.
        checks: checks of its guards (:func:`guard_checks`).
        context: what the entry refers to when it runs.

    Raises:
        BackendError: the backend specialized a value that exists only when the graph runs.
    """
    failed = captured.draws.taken_back_before(context.failed)
    bindings = {"run": executable.run, "failed": failed, **checks}
    if captured.suspension is not None:
        bindings["proceed"] = Frames(captured.suspension, context.parts).suspended
    if executable.hand_out is not None:
        executable.hand_out(_only_gradients(captured))
    late = _late_guards(captured, executable)
    replay = link(captured.residual, captured.name, bindings)
    if isinstance(executable.run, Proving):
        replay.__globals__["run"] = _until_proven(executable.run, replay.__globals__)
    replay = captured.draws.before(_behind(late, replay), MISS)
    if captured.suspension is not None and not context.is_part:
        native = captured.suspension.point.native
        replay = driven(replay, partial(compat.watched, on_computing=context.rest_computes) if native else None)
    fetch = _behind(late, link(captured.residual, captured.name, bindings, measuring=True))
    fetch = captured.draws.before(fetch, MISS, keep=False)
    return Entry(replay, fetch, (*captured.guards, *late), captured, executable, bindings)


def _only_gradients(captured: Captured) -> dict[int, int]:
    """Returns the outputs that become the gradient of a static input and nothing else: output -> input."""
    place = {item.source: i for i, item in enumerate(captured.traced.inputs) if item.kind == "static"}
    return {output: place[label] for label, output in captured.residual.gradients if label in place}


def _until_proven(proving: Proving, names: dict[str, Any]) -> Callable[[list[Any]], Any]:
    """Runs a graph under comparison, and replaces itself in ``names`` afterwards: later replays have no overhead.

    The graph itself must not refer to ``names``: generated code refers to the objects of the program.
    """

    def run(inputs: list[Any]) -> Any:
        try:
            return proving(inputs)
        finally:
            if proving.final is not None:
                names["run"] = proving.final

    return run


def _late_guards(captured: Captured, executable: Executable) -> list[Guard]:
    """Returns guards for what the backend relied on about the capture's symbols."""
    conditions, others = number_conditions(list(executable.conditions), captured.symbols)
    if others:
        reason = f"the backend specialized a value that exists only when the graph runs: {others[0]}"
        raise BackendError("SFX201", reason)
    return [Guard("number", condition.names[0][1], condition) for condition in conditions]


def _behind(late: list[Guard], replay: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replay that misses if one of the late guards fails."""
    if not late:
        return replay
    writer = Writer()
    lines = ["def behind(args, kwargs):", "    try:"]
    lines += [f"        {line}" for line in write_guards(writer, late)]
    lines += ["    except (KeyError, IndexError, AttributeError, ValueError, TypeError):", "        return MISS"]
    lines.append("    return replay(args, kwargs)")
    names = {**writer.names, "MISS": MISS, "replay": replay}
    return compile_function("behind", "\n".join(lines) + "\n", names, "<sidefx_train late guards>")  # type: ignore[no-any-return]
