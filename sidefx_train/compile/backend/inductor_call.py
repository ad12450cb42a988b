"""Calls Inductor: a functional graph becomes a compiled function, as one C++ library where that is possible.

Three forms are tried in turn: regions of equal layers lowered once each, one C++ function, and kernels behind
Inductor's Python wrapper.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.autotune.conv_layout import supports_channels_last
from sidefx_train.compile.backend.cpp_codegen.build_library import Building, build_library, load_library
from sidefx_train.compile.backend.cpp_codegen.compile_queue import BuildFailed
from sidefx_train.compile.backend.cpp_codegen.forked_lowering import Shared, may_fork
from sidefx_train.compile.backend.cpp_codegen.loop_dedup import LoopDedup
from sidefx_train.compile.backend.cpp_codegen.region_wrapper import (
    example_values,
    join_wrappers,
    region_module,
    regions_note,
)
from sidefx_train.compile.backend.graph_cache import cache_tag
from sidefx_train.compile.backend.inductor_options import options
from sidefx_train.compile.backend.pass_list import PassOptions, run_passes
from sidefx_train.compile.backend.passes.inductor_workarounds import index_by_permutations
from sidefx_train.compile.backend.passes.multi_tensor_rewrite import results_with_own_memory
from sidefx_train.compile.backend.passes.repeated_regions import Division, find_regions
from sidefx_train.compile.backend.passes.separate_results import order_writes, separate_results
from sidefx_train.compile.backend.passes.work_size import is_tiny
from sidefx_train.compile.backend.runners.aot_eager import example_inputs
from sidefx_train.compile.graph.artifacts import FunctionalGraph, TracedGraph
from sidefx_train.compile.graph.collectives import communicates, issued
from sidefx_train.compile.graph.fx_utils import generators
from sidefx_train.compile.graph.validation import check_graph
from sidefx_train.config import CompileConfig
from sidefx_train.errors import BackendError
from sidefx_train.gc_control import collect_younger
from sidefx_train.report import ChoiceRecord
from sidefx_train.switches import enabled


class Build:
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


def compile_functional(
    graph: FunctionalGraph,
    config: CompileConfig,
    traced: TracedGraph,
    notes: list[str],
    kept: bool,
    channels_last: bool,
    finds_attention: bool,
    while_compiling: Callable[[], Any],
) -> tuple[Build, Any, str]:
    """Compiles; if the all-C++ form fails, again with Inductor's Python wrapper.

    Args:
        graph: the functional graph; it is changed.
        config: options.
        traced: the captured graph.
        notes: gets notes for the report.
        kept: this library caches the result, so that Inductor must not.
        channels_last: convolutions of the graph are channels-last.
        finds_attention: Inductor's patterns may put attention together.
        while_compiling: called while the compiler runs.

    Returns:
        How the library was built, the compiled function, and its generated code.
    """
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

    def compile_with(settings: dict[str, Any], may_split: bool) -> tuple[Build, Any, str]:
        said: list[str] = []
        generating = LoopDedup().generating if enabled("loop_dedup") else lambda before: before
        with compat.inductor_options(settings), Building() if settings["cpp_wrapper"] else nullcontext() as building:
            build = Build(while_compiling, building)
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


def _compile_regions(graph: fx.Graph, division: Division, build: Build) -> tuple[Any, str, list[str]]:
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
