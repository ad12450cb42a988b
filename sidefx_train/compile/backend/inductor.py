"""The Inductor backend: options, the call, and its generated code."""

from __future__ import annotations

import ast
import functools
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.allocator import keep_freed_memory
from sidefx_train.compile.backend.autotune.attention import expand_attention, has_attention, is_written_out
from sidefx_train.compile.backend.autotune.conv_layout import choose_layout, damages_memory, supports_channels_last
from sidefx_train.compile.backend.autotune.lstm import has_layers
from sidefx_train.compile.backend.autotune.multi_tensor import choose_updates
from sidefx_train.compile.backend.autotune.timing import begin as begin_measuring
from sidefx_train.compile.backend.compile_once import compiling, is_marked, mark_made
from sidefx_train.compile.backend.cpp_codegen.build_library import (
    Building,
    accepts_flags,
    build_library,
    load_library,
)
from sidefx_train.compile.backend.cpp_codegen.compile_queue import BuildFailed
from sidefx_train.compile.backend.cpp_codegen.forked_lowering import Shared, may_fork
from sidefx_train.compile.backend.cpp_codegen.loop_dedup import LoopDedup
from sidefx_train.compile.backend.cpp_codegen.region_wrapper import (
    example_values,
    join_wrappers,
    region_module,
    regions_note,
)
from sidefx_train.compile.backend.graph_cache import (
    Lowered,
    cache_tag,
    find,
    has_library,
    identity_of,
    is_kept,
    keep,
    key_of,
)
from sidefx_train.compile.backend.pass_list import PassOptions, run_passes
from sidefx_train.compile.backend.passes.inductor_workarounds import index_by_permutations
from sidefx_train.compile.backend.passes.keep_composite_ops import join_complex, kept_composite_ops
from sidefx_train.compile.backend.passes.multi_tensor_groups import batch, results_with_own_memory
from sidefx_train.compile.backend.passes.repeated_regions import Division, find_regions
from sidefx_train.compile.backend.passes.scatter_add_rows import may_add_rows
from sidefx_train.compile.backend.passes.separate_results import order_writes, separate_results
from sidefx_train.compile.backend.passes.work_size import is_tiny
from sidefx_train.compile.backend.runners.aot_eager import example_inputs
from sidefx_train.compile.backend.runners.runner import generate
from sidefx_train.compile.backend.runners.runner_update import write_tail
from sidefx_train.compile.backend.verification.reference import Reference, functional_reference
from sidefx_train.compile.functionalization.functionalize import functionalize
from sidefx_train.compile.functionalization.moved_inputs import move_inputs
from sidefx_train.compile.gpu.replaying import replaying
from sidefx_train.compile.graph.artifacts import Executable, FunctionalGraph, RunnerPlan, TracedGraph
from sidefx_train.compile.graph.collectives import communicates, issued, multiplies_reduced
from sidefx_train.compile.graph.devices import generators_of
from sidefx_train.compile.graph.fx_utils import copied, generators
from sidefx_train.compile.graph.validation import check_graph
from sidefx_train.compile.native import start_build
from sidefx_train.compile.ops.collectives import BARRIER
from sidefx_train.compile.ops.sparse_tensors import decompositions as sparse_decompositions
from sidefx_train.config import CompileConfig
from sidefx_train.errors import BackendError
from sidefx_train.gc_control import collect_younger, fewer_collections
from sidefx_train.report import ChoiceRecord
from sidefx_train.switches import enabled, switched_off

_SERIAL_BELOW = 8192
"""Elements per thread below which entering a parallel region costs more than it saves."""


_SHOWN_SECONDS = 0.005
"""Seconds from which a pass has its own stage in the report."""

_lock = threading.RLock()
"""Inductor keeps settings and counters in globals: graphs are lowered one after the other."""


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)  # its owner does not exist in the child


def options(config: CompileConfig, graph: FunctionalGraph | None = None) -> dict[str, Any]:
    """Returns the Inductor settings of one compilation."""
    chosen: dict[str, Any] = {
        "fallback_random": config.rng == "eager",
        "size_asserts": False,
        "nan_asserts": False,
        "alignment_asserts": False,
        "scalar_asserts": False,
        "cpp.min_chunk_size": _SERIAL_BELOW,
        "reorder_for_locality": False,  # it delays weight gradients to the end, which keeps their inputs alive
        "cpp_wrapper_build_separate": True,  # the wrapper is a source of its own: see build_library.py
        "cpp.use_two_step_variance_threshold": 2**40,  # Welford's update divides once per element
    }
    if graph is not None and graph.device is not None:
        chosen["size_asserts"] = True  # of results of libraries: kernels write by the planned layout; replays skip it
    if graph is not None:
        chosen["cpp_wrapper"] = _one_cpp_call(graph.module)
        if any(node.target is BARRIER for node in graph.module.graph.nodes):
            chosen["reorder_for_peak_memory"] = False  # it begins with what needs no memory
        if graph.covered and graph.device is None:  # kernels on an accelerator assert, as eager's do
            chosen["assert_indirect_indexing"] = False
        if is_tiny(graph.module) or not graph.covered:  # an error inside a parallel region ends the process
            chosen["cpp.threads"] = 1
    return compat.known_inductor_options(chosen)


def _one_cpp_call(module: fx.GraphModule) -> bool:
    """Returns True if the graph can be one C++ function: all on CPU, Python operators callable from C++.

    Collectives must be called through the dispatcher, by which a comparison avoids them.
    """
    if communicates(module.graph) and not compat.calls_collectives():
        return False
    for node in module.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("sidefx.rnn") and not compat.calls_dispatcher():
            return False
        device = getattr(node.meta.get("val"), "device", None)
        if device is not None and device.type != "cpu":
            return False
    return True


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
        build, call, code = _compile(graph, config, traced, notes, kept, last, finds_attention, readable)
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


class _Build:
    """Builds Inductor's C++ and records the result.

    Attributes:
        while_compiling: called while the compiler runs.
        building: compiles kernels as they are written; ``None`` if the graph is not one C++ function.
        library: name of the library, ``None`` if there is no single one.
        seconds: wall time of the compiler and of loading.
        constants: the graph has constants that are not inputs.
        choices: choices made by autotuning in this library's passes.
        pass_seconds: seconds of each pass.
        parts: wrapper, kernels and libraries of a region; ``None`` if a graph is built as a whole.
        written: its kernels.
        poll_worker: called after a kernel has been written.
    """

    def __init__(self, while_compiling: Callable[[], Any], building: Building | None) -> None:
        self.while_compiling = while_compiling
        self.building = building
        self.library: str | None = None
        self.seconds = 0.0
        self.constants = False
        self.choices: list[ChoiceRecord] = []
        self.pass_seconds: dict[str, float] = {}
        self.parts: list[tuple[str, str, list[str]]] | None = None
        self.written: list[str] = []
        self.poll_worker: Callable[[], None] = lambda: None

    def __call__(self, caller: str, kernels: str, outputs: int, libraries: list[str]) -> Any:
        if self.parts is None:
            return self.whole(caller, kernels, outputs, libraries)
        self.parts.append((caller, kernels, libraries))
        return _no_part_alone

    def add(self, kernel: str) -> None:
        """Adds a kernel as soon as it is written."""
        self.written.append(kernel)
        if self.building is not None:
            self.building.add(kernel)
        self.poll_worker()

    def whole(self, caller: str, kernels: str, outputs: int, libraries: list[str]) -> Any:
        """Builds the library of a graph and loads it."""
        began = time.perf_counter()
        name = build_library(caller, kernels, outputs, libraries, self._wait, self.building)
        entry = load_library(name)
        self.seconds += time.perf_counter() - began
        if entry is None:
            raise BuildFailed("the library was removed before it could be loaded")
        self.library = name if not libraries else None
        return entry

    def _wait(self) -> None:
        self.while_compiling()
        collect_younger()


def _no_part_alone(_: list[Any]) -> list[Any]:
    raise AssertionError("the outer wrapper calls a region")


def _compile(
    graph: FunctionalGraph,
    config: CompileConfig,
    traced: TracedGraph,
    notes: list[str],
    kept: bool,
    channels_last: bool,
    finds_attention: bool,
    while_compiling: Callable[[], Any],
) -> tuple[_Build, Any, str]:
    """Compiles; if the all-C++ form fails, again with Inductor's Python wrapper."""
    compat.register_kernel_lowerings()
    static = [i for i, feed in enumerate(graph.feeds) if _is_static(graph, feed)]
    chosen = options(config, graph) | {
        "layout_optimization": channels_last and supports_channels_last(graph.module.graph)
    }
    threads = 1 if is_tiny(graph.module) else torch.get_num_threads()
    # Either our cache, or none: Inductor's confuses generators, and graphs lowered under different conditions on their
    # sizes, since the symbols are no inputs of ours.
    if kept or generators(graph.module) or _has_symbols(graph.module):
        chosen |= {"fx_graph_cache": False, "force_disable_caches": True}  # an environment variable overrides the first
    if generators(graph.module):  # in the order of the step: each draw advances the generator
        chosen["fallback_random"] = True

    if enabled("inductor_workarounds"):
        index_by_permutations(graph.module)

    def compile_with(settings: dict[str, Any], may_split: bool) -> tuple[_Build, Any, str]:
        said: list[str] = []
        generating = LoopDedup().generating if enabled("loop_dedup") else lambda before: before
        with compat.inductor_options(settings), Building() if settings["cpp_wrapper"] else nullcontext() as building:
            build = _Build(while_compiling, building)
            if building is not None:
                building.begin()
            with (
                compat.lowering_notes() as warned,
                compat.inductor_cache_of(cache_tag()),
                compat.building_cpp(build, build.add),
                compat.inductor_lowering(traced.fake_mode, generating),
            ):
                module = compat.inductor_passes(graph.module, finds_attention)
                if issued(module.graph) != issued(graph.module.graph):
                    raise BackendError("SFX201", "Inductor's passes changed the collectives of the graph")
                separate_results(module, graph.results, results_with_own_memory(graph))
                if enabled("copies_for_writes"):
                    order_writes(module.graph)
                check_graph("Inductor's passes", module, traced.fake_mode, functional=True)
                passes = PassOptions(threads, config.autotune == "on", config.deterministic)
                passed = run_passes(module, traced.fake_mode, passes)
                build.choices, build.pass_seconds = passed.choices, passed.seconds
                said += passed.notes
                division = find_regions(module.graph) if may_split and enabled("repeated_regions") else None
                if division is None:
                    call, code = compat.inductor_compile(module, example_inputs(graph), static)
                else:
                    said.append(regions_note(division, module.graph))
                    call, code, more = _compile_regions(module.graph, division, build)
                    said.extend(more)
        missing = undefined_symbols(code) if not settings["cpp_wrapper"] and _has_symbols(graph.module) else []
        if missing:
            raise BackendError("SFX201", f"Inductor's code reads {', '.join(missing)}, which it does not define")
        said.extend(warned)
        build.constants = "constants_tensor" in code
        notes.extend(said)
        return build, call, code

    splits = chosen["cpp_wrapper"] and kept and not generators(graph.module) and not communicates(graph.module.graph)
    attempts = [(chosen, True)] if splits else []
    attempts += [(chosen, False), ({**chosen, "cpp_wrapper": False}, False)][: 1 + chosen["cpp_wrapper"]]
    for settings, may_split in attempts[:-1]:
        try:
            return compile_with(settings, may_split)
        except Exception as error:
            how = "Lowering by regions" if may_split else "C++ wrapper"
            instead = "the whole graph is lowered" if may_split else "Python wrapper used"
            notes.append(f"{how} failed ({type(error).__name__}: {error}), {instead}"[:300])
    return compile_with(*attempts[-1])


@dataclass(frozen=True)
class _Sources:
    """Sources of a lowered region.

    Attributes:
        caller: source of its ``inductor_entry_impl``.
        kernels: source of the kernels that it calls.
        libraries: libraries to link.
        written: the kernels, one by one.
        code: all of Inductor's output.
        notes: notes for the report.
    """

    caller: str
    kernels: str
    libraries: list[str]
    written: list[str]
    code: str
    notes: list[str]


def _compile_regions(graph: fx.Graph, division: Division, build: _Build) -> tuple[Any, str, list[str]]:
    """Lowers each region class, and builds one library of all; returns the call, the code, and notes.

    The longest comes first: its kernels, which take longest to compile, are compiled while the others are lowered.
    """
    kinds = sorted(set(division.classes), key=lambda kind: len(division.regions[kind].items), reverse=True)

    def lower(i: int) -> _Sources:
        region = division.regions[kinds[i]]
        build.parts, build.written = [], []
        with compat.numbering_kernels(kinds[i]), compat.lowering_notes() as notes:
            code = compat.inductor_compile(region_module(region), example_values(region), [])[1]
        ((caller, kernels, libraries),) = build.parts
        return _Sources(caller, kernels, libraries, build.written, code, notes)

    def lower_in_worker(i: int) -> _Sources:
        build.building = None  # it is the other process's, like its compilers
        return lower(i)

    def compile_kernels(made: _Sources) -> None:
        if build.building is not None:
            for kernel in made.written:
                build.building.add(kernel)

    notes: list[str] = []
    if len(kinds) > 1 and may_fork():
        shared = Shared(len(kinds), lower, lower_in_worker, compile_kernels)
        build.poll_worker = shared.poll
        sources = shared.run()
        notes.append(f"{shared.received} of {len(kinds)} region classes lowered by a fork of the process")
    else:
        sources = list(map(lower, range(len(kinds))))
    wrappers = {kind: made.caller for kind, made in zip(kinds, sources, strict=True)}
    kernels = "".join(made.kernels for made in sources)
    libraries = sorted({each for made in sources for each in made.libraries})
    results = len(next(iter(reversed(graph.nodes))).args[0])
    entry = build.whole(join_wrappers(division, graph, wrappers), kernels, results, libraries)
    notes += dict.fromkeys(note for made in sources for note in made.notes)
    return compat.call_aoti(entry), "\n".join(made.code for made in sources), notes


def undefined_symbols(code: str) -> list[str]:
    """Returns the sizes (``s0``, ``u1``) that a Python wrapper of Inductor reads and no line of it defines.

    A compiler would refuse them in C++; here they would raise a ``NameError`` when the graph runs.
    """
    nodes = list(ast.walk(ast.parse(code)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defined = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    read = {node.id for node in names if isinstance(node.ctx, ast.Load) and re.fullmatch(r"[su]\d+", node.id)}
    return sorted(read - defined)


def _has_symbols(module: fx.GraphModule) -> bool:
    values = (node.meta.get("val") for node in module.graph.nodes)
    return any(
        isinstance(number, compat.SYMBOLS)
        for value in values
        for number in ((*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,))
    )


def _is_static(graph: FunctionalGraph, feed: str) -> bool:
    return feed == "packed" or (feed.startswith("a") and graph.inputs[int(feed[1:])].kind == "static")
