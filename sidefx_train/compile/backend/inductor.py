"""The Inductor backend: a captured graph is functionalized, lowered and cached, or found in the cache.

``inductor_options.py`` has the settings, ``inductor_call.py`` compiles the functional graph.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.allocator import keep_freed_memory
from sidefx_train.compile.backend.autotune.attention import expand_attention, has_attention, is_written_out
from sidefx_train.compile.backend.autotune.conv_layout import choose_layout, damages_memory
from sidefx_train.compile.backend.autotune.lstm import has_layers
from sidefx_train.compile.backend.autotune.multi_tensor import choose_updates
from sidefx_train.compile.backend.autotune.timing import begin as begin_measuring
from sidefx_train.compile.backend.compile_once import compiling, is_marked, mark_made
from sidefx_train.compile.backend.cpp_codegen.build_library import accepts_flags, load_library
from sidefx_train.compile.backend.graph_cache import Lowered, find, has_library, identity_of, is_kept, keep, key_of
from sidefx_train.compile.backend.inductor_call import compile_functional
from sidefx_train.compile.backend.inductor_options import options
from sidefx_train.compile.backend.passes.keep_composite_ops import join_complex, kept_composite_ops
from sidefx_train.compile.backend.passes.multi_tensor_rewrite import batch
from sidefx_train.compile.backend.passes.scatter_add_rows import may_add_rows
from sidefx_train.compile.backend.passes.separate_results import order_writes
from sidefx_train.compile.backend.passes.work_size import is_tiny
from sidefx_train.compile.backend.runners.runner import generate
from sidefx_train.compile.backend.runners.runner_update import write_tail
from sidefx_train.compile.backend.verification.reference import Reference, functional_reference
from sidefx_train.compile.functionalization.functionalize import functionalize
from sidefx_train.compile.functionalization.moved_inputs import move_inputs
from sidefx_train.compile.gpu.replaying import replaying
from sidefx_train.compile.graph.artifacts import Executable, FunctionalGraph, RunnerPlan, TracedGraph
from sidefx_train.compile.graph.collectives import multiplies_reduced
from sidefx_train.compile.graph.devices import generators_of
from sidefx_train.compile.graph.fx_utils import copied, generators
from sidefx_train.compile.graph.validation import check_graph
from sidefx_train.compile.native import start_build
from sidefx_train.compile.ops.sparse_tensors import decompositions as sparse_decompositions
from sidefx_train.config import CompileConfig
from sidefx_train.gc_control import fewer_collections
from sidefx_train.report import ChoiceRecord
from sidefx_train.switches import enabled, switched_off

_SHOWN_SECONDS = 0.005
"""Seconds from which a pass has its own stage in the report."""

_lock = threading.RLock()
"""Inductor keeps settings and counters in globals: graphs are lowered one after the other."""


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)  # its owner does not exist in the child


@compat.in_copied_context
def build_inductor(traced: TracedGraph, config: CompileConfig) -> Executable:
    """Functionalizes with Inductor's decompositions and compiles the result, or loads it from the cache."""
    clock = Clock()
    graph = traced.module.graph
    start_build(may_add_rows(graph), has_layers(graph), has_attention(graph))
    keep_freed_memory()
    identity = identity_of(traced, config)
    key = identity if has_library(traced) else None

    def found() -> Executable | None:
        lowered = find(key, traced, load_library) if key is not None else None
        clock.lap("find")
        if lowered is None:
            return None
        lowered = replace(lowered, notes=(*lowered.notes, "compiled graph from the cache"))
        return _executable(lowered, traced, config, clock, key)

    executable = found()
    if executable is not None:
        return executable
    with compiling(identity, lambda: is_kept(key) if key is not None else is_marked(str(identity))) as waited:
        clock.lap("wait")
        executable = found() if waited else None
        return executable if executable is not None else _made(traced, config, clock, key, identity)


def _made(
    traced: TracedGraph, config: CompileConfig, clock: Clock, key: str | None, identity: str | None
) -> Executable:
    """Lowers a graph and writes it to the cache."""
    lowered = _lower(traced, config, clock, key is not None)
    if key is not None:
        keep(key, lowered)
    elif identity is not None:
        mark_made(identity)
    clock.lap("store")
    return _executable(lowered, traced, config, clock, key)


@compat.in_copied_context
def inductor_reference(traced: TracedGraph, config: CompileConfig, graph: FunctionalGraph | None = None) -> Reference:
    """Returns the functional graph that is lowered, run op by op, with the random numbers of its C++.

    Args:
        traced: the captured graph.
        config: options.
        graph: the functional graph, if known from lowering; it is changed.
    """
    with _lock, compat.inductor_options(options(config)), compat.quick_vector_probes(accepts_flags):
        if graph is None:
            decompositions = {**compat.inductor_decompositions(), **sparse_decompositions(config.deterministic)}
            graph = functionalize(
                traced,
                decompositions=decompositions,
                tensor_scalars=True,
                channels_last=torch.backends.mkldnn.is_available(),
                instead=kept_composite_ops(traced.module.graph, decompositions) if enabled("composite_ops") else {},
            )
            join_complex(graph.module, traced.fake_mode)
        chosen = options(config, graph)
        if generators(graph.module):
            chosen["fallback_random"] = True
        with compat.inductor_options(chosen), compat.inductor_lowering(traced.fake_mode):
            module = compat.inductor_passes(graph.module, is_written_out(graph.module))
            if enabled("copies_for_writes"):
                order_writes(module.graph)
    return functional_reference(graph, module, traced)


@compat.in_copied_context
def lower_for_another(traced: TracedGraph, config: CompileConfig) -> bool:
    """Compiles a graph into the cache; returns False if it cannot be cached."""
    key = key_of(traced, config)
    if key is None:
        return False
    with compiling(key, lambda: is_kept(key)):
        if not is_kept(key):
            keep(key, _lower(traced, config, Clock(), True))
    return is_kept(key)


def take_lowered(traced: TracedGraph, config: CompileConfig, key: str | None = None) -> Executable | None:
    """Returns what :func:`lower_for_another` left in the cache; ``None`` if there is nothing.

    Args:
        traced: the captured graph.
        config: options.
        key: cache key, if lowering has removed unused nodes of the graph since.
    """
    clock = Clock()
    keep_freed_memory()
    key = key or key_of(traced, config)
    lowered = find(key, traced, load_library) if key is not None else None
    clock.lap("find")
    return _executable(lowered, traced, config, clock, key) if lowered is not None else None


def _executable(
    lowered: Lowered, traced: TracedGraph, config: CompileConfig, clock: Clock, key: str | None
) -> Executable:
    recorded, replays = replaying(lowered.plan, lowered.graph, config) if lowered.graph is not None else (None, None)
    if replays is not None:
        replays.kernels, replays.library_calls = compat.launches_of(lowered.sources["inductor"])
        replays.updates = len(lowered.plan.tail) + len(lowered.plan.deferred_copies)
    run, text = generate(
        lowered.plan,
        lowered.call,
        write_tail,
        traced.uses_rng,
        lowered.serial,
        drawn_from=generators_of(traced),
        replaying=recorded,
    )
    clock.lap("runner")
    sources = {"runner": text, **lowered.sources}
    identity = f"{key}_{lowered.library}" if key is not None and lowered.library is not None else ""
    hand_out = recorded.hand_out if recorded is not None else None
    functional = [] if lowered.functional is None else [lowered.functional]
    made = Executable(run, True, sources, clock.seconds, lowered.notes, lowered.choices, device_section=recorded)
    return replace(made, identity=identity, functional=functional, replays=replays, hand_out=hand_out)


class Clock:
    """Wall seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Adds the time since the last lap to ``stage``."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def move(self, stage: str, source: str, seconds: float) -> None:
        """Shows seconds within another stage as their own."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.seconds[source] -= seconds


def _lower(traced: TracedGraph, config: CompileConfig, clock: Clock, kept: bool) -> Lowered:
    """Compiles; bypasses Inductor's own cache if this library caches the graph (``kept``)."""
    with _lock, fewer_collections():
        clock.lap("wait")
        return _lower_alone(traced, config, clock, kept)


def _lower_alone(traced: TracedGraph, config: CompileConfig, clock: Clock, kept: bool) -> Lowered:
    replicated = config.autotune == "on" and multiplies_reduced(traced.module.graph)
    if replicated:
        config = replace(config, autotune="off")  # what is fastest differs from process to process
    traced, moved = move_inputs(traced)
    relied_on = set(compat.recorded_conditions(traced.fake_mode.shape_env))
    with compat.inductor_options(options(config)):
        decompositions = {**compat.inductor_decompositions(), **sparse_decompositions(config.deterministic)}
    with compat.quick_vector_probes(accepts_flags):
        clock.lap("import")
        begin_measuring(config.autotune_seconds)
        last = torch.backends.mkldnn.is_available() and not damages_memory(traced.module.graph)
        choices, laid_out = list[ChoiceRecord](), ""
        if last and config.autotune == "on" and enabled("channels_last"):
            last, choices = choose_layout(traced.module.graph, torch.get_num_threads())
            laid_out = "" if last else "convolutions are contiguous"
            clock.lap("layout")
        composites = kept_composite_ops(traced.module.graph, decompositions) if enabled("composite_ops") else {}
        graph = functionalize(
            traced,
            decompositions=decompositions,
            tensor_scalars=True,
            channels_last=last,
            instead=composites,
        )
        graph = replace(graph, moved=moved)
        clock.lap("functionalize")
        join_complex(graph.module, traced.fake_mode)
        compared = traced.uses_rng and config.rng != "eager" and config.verify != 0
        functional = replace(graph, module=copied(graph.module)) if compared else None
        if config.autotune == "on" and enabled("multi_tensor"):
            groups, updates = choose_updates(graph, functools.partial(_lowered_alone, config, traced.fake_mode))
            graph, choices = batch(graph, groups), [*choices, *updates]
        tiny = is_tiny(graph.module)
        attention = ""
        finds_attention = is_written_out(graph.module)
        if config.autotune == "on" and enabled("attention"):
            threads = 1 if tiny else torch.get_num_threads()
            attention, attended = expand_attention(graph.module, traced.fake_mode, threads)
            choices += attended
        check_graph("attention", graph.module, traced.fake_mode, graph.feeds, functional=True)
        readable = functools.cache(lambda: graph.module.print_readable(print_output=False))
        notes = [
            *graph.notes,
            "kernels are not measured: all processes compute what follows an all-reduce" if replicated else "",
            laid_out,
            attention,
            f"{len(composites)} composite operators kept whole" if composites else "",
        ]
        build, call, code = compile_functional(graph, config, traced, notes, kept, last, finds_attention, readable)
    clock.lap("lower")
    clock.move("C++", "lower", build.seconds)
    for name, seconds in build.pass_seconds.items():
        if seconds >= _SHOWN_SECONDS:
            clock.move(f"pass {name}", "lower", seconds)
    if switched_off():
        notes.append(f"switched off: {', '.join(sorted(switched_off()))}")
    if tiny:
        notes.append("tiny step: runs on one thread")
    plan = RunnerPlan(**{field.name: getattr(graph, field.name) for field in fields(RunnerPlan)})
    sources = {"graph": readable(), "inductor": code}
    whole = build.library is not None and all(isinstance(result, torch.Tensor) for result in graph.results)
    # Conditions added by lowering become guards of the entry: a cached graph would not have them.
    added = set(compat.recorded_conditions(traced.fake_mode.shape_env)) - relied_on
    library = build.library if whole and not build.constants and not added else None
    said = tuple(note for note in notes if note)
    recorded = graph.module.graph
    return Lowered(plan, call, tiny, sources, said, (*choices, *build.choices), library, functional, recorded)


def _lowered_alone(config: CompileConfig, fake_mode: Any, module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Lowers a graph for a measurement."""
    examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with compat.inductor_options(options(config)), compat.inductor_lowering(fake_mode):
        return compat.inductor_compile(compat.inductor_passes(module, False), examples, [*range(len(examples))])[0]  # type: ignore[no-any-return]
