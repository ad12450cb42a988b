"""Inductor: lowering options, the call, and where its generated code can be read."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import fx

from sidefx_train import _torch_compat as compat
from sidefx_train.compile.artifacts import Executable, FunctionalGraph, TracedGraph
from sidefx_train.compile.backend.attention import expand_attention
from sidefx_train.compile.backend.functional import example_inputs
from sidefx_train.compile.backend.memory import keep_freed_memory
from sidefx_train.compile.backend.products import choose_products
from sidefx_train.compile.backend.runner import generate
from sidefx_train.compile.backend.size import is_tiny
from sidefx_train.compile.backend.tail import write_tail
from sidefx_train.compile.functionalize import functionalize
from sidefx_train.compile.native import start_build
from sidefx_train.config import CompileConfig

_SERIAL_BELOW = 8192
"""Elements per thread below which entering a parallel region costs more than it saves."""


def options(config: CompileConfig, graph: FunctionalGraph | None = None) -> dict[str, Any]:
    """Inductor settings of one compilation."""
    chosen: dict[str, Any] = {
        "fallback_random": config.rng == "eager",
        "size_asserts": False,
        "nan_asserts": False,
        "alignment_asserts": False,
        "scalar_asserts": False,
        "cpp.min_chunk_size": _SERIAL_BELOW,
        "cpp.use_two_step_variance_threshold": 2**40,  # Welford's update divides once per element
    }
    if graph is not None:
        chosen["cpp_wrapper"] = _one_cpp_call(graph.module)
        if graph.covered:
            chosen["assert_indirect_indexing"] = False
        if is_tiny(graph.module) or not graph.covered:  # an error inside a parallel region ends the process
            chosen["cpp.threads"] = 1
    return compat.known_inductor_options(chosen)


def _one_cpp_call(module: fx.GraphModule) -> bool:
    """True if the whole graph can be one C++ function: everything on CPU and no operator written in Python."""
    for node in module.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("sidefx.rnn"):
            return False
        device = getattr(node.meta.get("val"), "device", None)
        if device is not None and device.type != "cpu":
            return False
    return True


def build_inductor(traced: TracedGraph, config: CompileConfig) -> Executable:
    """Functionalizes with Inductor's decompositions and compiles the result."""
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    start_build()
    keep_freed_memory()
    with compat.inductor_options(options(config)):
        decompositions = compat.inductor_decompositions()
    seconds["import"] = time.perf_counter() - start
    start = time.perf_counter()
    graph = functionalize(
        traced, decompositions=decompositions, tensor_scalars=True, channels_last=torch.backends.mkldnn.is_available()
    )
    seconds["functionalize"] = time.perf_counter() - start
    start = time.perf_counter()
    tiny = is_tiny(graph.module)
    attention = expand_attention(graph.module, traced.fake_mode, 1 if tiny else torch.get_num_threads())
    readable = graph.module.print_readable(print_output=False)
    notes = [*graph.notes, attention]
    call, code = _lower(graph, config, traced, notes)
    seconds["lower"] = time.perf_counter() - start
    if tiny:
        notes.append("tiny step: runs on one thread")
    run, text = generate(graph, call, write_tail, uses_rng=traced.uses_rng, serial=tiny)
    return Executable(
        run,
        atomic=True,
        sources={"runner": text, "graph": readable, "inductor": code},
        seconds=seconds,
        notes=tuple(n for n in notes if n),
    )


def _lower(graph: FunctionalGraph, config: CompileConfig, traced: TracedGraph, notes: list[str]) -> tuple[Any, str]:
    """Compiles; where the all-C++ form fails, once more with Inductor's Python wrapper."""
    compat.register_linear_lowering()
    static = [i for i, feed in enumerate(graph.feeds) if _is_static(graph, feed)]
    chosen = options(config, graph)
    threads = 1 if is_tiny(graph.module) else torch.get_num_threads()

    def compile_with(settings: dict[str, Any]) -> tuple[Any, str]:
        said: list[str] = []
        with compat.inductor_options(settings):
            done = compat.inductor_compile(
                graph.module,
                example_inputs(graph),
                static,
                traced.fake_mode,
                [lambda module: said.append(choose_products(module, threads))],
            )
        notes.extend(said)
        return done

    if not chosen["cpp_wrapper"]:
        return compile_with(chosen)
    try:
        return compile_with(chosen)
    except Exception as error:
        notes.append(f"C++ wrapper failed ({type(error).__name__}), Python wrapper used")
        return compile_with({**chosen, "cpp_wrapper": False})


def _is_static(graph: FunctionalGraph, feed: str) -> bool:
    return feed == "packed" or (feed.startswith("a") and graph.inputs[int(feed[1:])].kind == "static")
