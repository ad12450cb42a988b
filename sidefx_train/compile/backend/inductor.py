"""Inductor: lowering options, the call, and where its generated code can be read."""

from __future__ import annotations

import time
from typing import Any

from sidefx_train import _torch_compat as compat
from sidefx_train.compile.artifacts import Executable, FunctionalGraph, TracedGraph
from sidefx_train.compile.backend.functional import example_inputs
from sidefx_train.compile.backend.native import start_build
from sidefx_train.compile.backend.runner import generate
from sidefx_train.compile.backend.tail import write_tail
from sidefx_train.compile.functionalize import functionalize
from sidefx_train.config import CompileConfig


def options(config: CompileConfig, graph: FunctionalGraph | None = None) -> dict[str, Any]:
    """Inductor settings of one compilation."""
    chosen: dict[str, Any] = {
        "fallback_random": config.rng == "eager",
        "size_asserts": False,
        "nan_asserts": False,
        "alignment_asserts": False,
        "scalar_asserts": False,
    }
    if graph is not None and graph.covered:
        chosen["assert_indirect_indexing"] = False
    return compat.known_inductor_options(chosen)


def build_inductor(traced: TracedGraph, config: CompileConfig) -> Executable:
    """Functionalizes with Inductor's decompositions and compiles the result."""
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    start_build()
    with compat.inductor_options(options(config)):
        decompositions = compat.inductor_decompositions()
    seconds["import"] = time.perf_counter() - start
    start = time.perf_counter()
    graph = functionalize(traced, decompositions=decompositions, tensor_scalars=True)
    seconds["functionalize"] = time.perf_counter() - start
    start = time.perf_counter()
    readable = graph.module.print_readable(print_output=False)
    static = [i for i, feed in enumerate(graph.feeds) if _is_static(graph, feed)]
    with compat.inductor_options(options(config, graph)):
        call, code = compat.inductor_compile(graph.module, example_inputs(graph), static, traced.fake_mode)
    seconds["lower"] = time.perf_counter() - start
    run, text = generate(graph, call, write_tail, uses_rng=traced.uses_rng)
    return Executable(
        run,
        atomic=True,
        sources={"runner": text, "graph": readable, "inductor": code},
        seconds=seconds,
        notes=graph.notes,
    )


def _is_static(graph: FunctionalGraph, feed: str) -> bool:
    return feed == "packed" or (feed.startswith("a") and graph.inputs[int(feed[1:])].kind == "static")
