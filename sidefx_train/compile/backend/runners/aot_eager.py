"""Runs the functionalized graph op by op, or passes it to a compiler of the user's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.runners.runner import generate
from sidefx_train.compile.functionalization.functionalize import functionalize
from sidefx_train.compile.functionalization.moved_inputs import move_inputs
from sidefx_train.compile.gpu.replaying import records_on_host, replaying
from sidefx_train.compile.graph.alias_analysis import Aliases
from sidefx_train.compile.graph.artifacts import Executable, FunctionalGraph, TracedGraph
from sidefx_train.compile.graph.devices import generators_of
from sidefx_train.compile.graph.gradient_layouts import for_any_layout
from sidefx_train.config import CompileConfig


def build_functional(
    traced: TracedGraph, config: CompileConfig, compiler: Callable[..., Any] | None = None
) -> Executable:
    """Functionalizes the graph and runs it op by op, or through ``compiler(gm, example_inputs)``."""
    start = time.perf_counter()
    traced, moved = move_inputs(traced)
    graph = replace(functionalize(traced, tensor_scalars=compiler is not None or records_on_host()), moved=moved)
    functional = time.perf_counter()
    module = graph.module
    readable = module.print_readable(print_output=False)
    if compiler is None:
        function = for_any_layout(module) if traced.gradients else module.forward
    else:
        function = compiler(module, example_inputs(graph))

    unproven = _unproven_strides(traced, graph) if compiler is None and not traced.gradients else []
    own = [int(out.value.text[1:]) for out in graph.outputs if out.version is not None and compiler is None]

    def call(args: list[Any]) -> Any:
        with torch.no_grad():
            results = function(*args)
        if not own and not unproven:
            return results
        results = list(results)
        for position, strides in unproven:  # kernels choose others than fake tensors
            made = results[position]
            if made.stride() != strides and _only_of_single(made, strides):
                results[position] = compat.without_view_relation(made.as_strided(made.shape, strides))
        for position in own:  # removed in-place operations make no views
            results[position] = compat.without_view_relation(results[position])
        return results

    recorded, replays = replaying(graph, module.graph, config)
    run, text = generate(
        graph,
        call,
        uses_rng=traced.uses_rng,
        counts=compiler is None,
        drawn_from=generators_of(traced),
        replaying=recorded,
    )
    return Executable(
        run,
        atomic=compiler is None or graph.covered,
        sources={"runner": text, "graph": readable},
        seconds={"functionalize": functional - start, "compile": time.perf_counter() - functional},
        notes=graph.notes,
        replays=replays,
        hand_out=recorded.hand_out if recorded is not None else None,
        device_section=recorded,
    )


def _unproven_strides(traced: TracedGraph, graph: FunctionalGraph) -> list[tuple[int, tuple[int, ...]]]:
    """Returns positions of written results with dimensions of size 1, with the strides they have kept."""
    aliases, found = Aliases(traced.module.graph), []
    written = {root for node in traced.module.graph.nodes for root in aliases.writes(node)}
    (returned,) = next(iter(reversed(traced.module.graph.nodes))).args
    for node, out in zip(returned, graph.outputs, strict=True):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or not aliases.roots[node] & written:
            continue
        fixed = all(isinstance(n, int) for n in (*value.shape, *value.stride()))
        if fixed and 1 in value.shape and out.kind == "result" and out.value.text.startswith("r"):
            found.append((int(out.value.text[1:]), tuple(value.stride())))
    return found


def _only_of_single(made: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Returns True if the strides differ only in dimensions of size 1."""
    return all(size == 1 or a == b for size, a, b in zip(made.shape, made.stride(), strides, strict=True))


def example_inputs(graph: FunctionalGraph) -> list[Any]:
    """Returns the example value of each placeholder of a functional graph."""
    return [node.meta["val"] for node in graph.module.graph.nodes if node.op == "placeholder"]
