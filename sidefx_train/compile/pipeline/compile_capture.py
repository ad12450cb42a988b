"""Turns a capture into an entry: the last stages of the compiler.

    capture (capture_run.py, capture/)  the step runs once on shadows: graph, effects, guards
    residual (residual/)    guards, prologue and epilogue as generated source
    backend (functionalization/, backend/)  the graph becomes a callable
    link                    the generated function is bound to the callable: an Entry

Every stage passes a plain value to the next; none imports another's internals. Nothing outside is changed before the
first run of an :class:`Entry`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sidefx_train import torch_compat as compat
from sidefx_train.compile.autograd.compiled_function import join
from sidefx_train.compile.autograd.min_cut_partition import recompute
from sidefx_train.compile.backend.compile_graph import build, build_casting, is_functionalized_again, reference
from sidefx_train.compile.backend.runners.reset_generators import with_generator_reset
from sidefx_train.compile.backend.verification.first_runs import Proving, Verdict, verified
from sidefx_train.compile.backend.verification.reference import Reference
from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.guards.native_check import object_check, split
from sidefx_train.compile.capture.guards.python_check import (
    HANDLER_RAISED,
    answering_errors,
    tensor_check,
    write_guards,
)
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.guards.symbol_guards import number_conditions
from sidefx_train.compile.capture.resume.driver import Frames, driven
from sidefx_train.compile.common.generated_code import compile_function
from sidefx_train.compile.graph.artifacts import Executable, TracedGraph
from sidefx_train.compile.graph.validation import check_traced
from sidefx_train.compile.pipeline.captured import Captured
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.pipeline.run_context import Call, RunContext
from sidefx_train.compile.residual.generate import MISS, link
from sidefx_train.config import CompileConfig
from sidefx_train.errors import BackendError


def partitioned(captured: Captured, config: CompileConfig) -> Captured:
    """Returns the capture with less saved for its backward, if it has one and ``config.partition`` allows it."""
    if captured.joint is None or config.partition == "default":
        return captured
    joint = recompute(captured.joint)
    check_traced("partition", *joint.graphs)
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
        backwards = [compiled(stage.backward, "backward: ") for stage in captured.joint.compiled]
    one_by_one = config.backend in ("eager", "aot_eager")
    casting = [build_casting(stage.backward) if one_by_one else None for stage in captured.joint.compiled]
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
    state = captured.state_check
    if state.under_function_modes:
        bindings |= {name: compat.with_functions(bindings[name], state) for name in ("failed", "check_state")}
    if captured.suspension is not None:
        make_watch = partial(compat.Watch, context.rest_computes) if context.is_part else None
        bindings["proceed"] = Frames(captured.suspension, context.parts, make_watch).suspended
    if executable.hand_out is not None:
        executable.hand_out(_only_gradients(captured))
    late = _late_guards(captured, executable)
    replay = link(captured.residual, captured.name, bindings)
    if isinstance(executable.run, Proving):
        replay.__globals__["run"] = _until_proven(executable.run, replay.__globals__)
    replay = captured.draws.before(_behind(late, replay), MISS)
    if captured.suspension is not None and not context.is_part:
        native = captured.suspension.point.native
        run_rest = partial(compat.watched, on_computing=context.rest_computes) if native else None
        replay = driven(replay, run_rest, context.ended_in_parts)
    if state.under_function_modes:
        replay = compat.without_functions(replay, state, MISS)
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
    lines += [*answering_errors("return MISS"), "    return replay(args, kwargs)"]
    names = {**writer.names, **HANDLER_RAISED, "MISS": MISS, "replay": replay}
    return compile_function("behind", "\n".join(lines) + "\n", names, "<sidefx_train late guards>")  # type: ignore[no-any-return]
