"""Runs the captured graph op by op, in place as captured: the reference for every other backend."""

from __future__ import annotations

import time
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.runners.own_results import own_versions, set_own_versions
from sidefx_train.compile.backend.runners.runner_source import tuple_text
from sidefx_train.compile.graph.alias_analysis import Aliases
from sidefx_train.compile.graph.artifacts import Executable, TracedGraph
from sidefx_train.compile.graph.collectives import communicates, stopped
from sidefx_train.compile.graph.devices import generators_of
from sidefx_train.compile.graph.gradient_layouts import for_any_layout


def build_eager(traced: TracedGraph) -> Executable:
    """Runs ``traced.module`` itself; a failed run restores every written input."""
    start = time.perf_counter()
    graph = traced.module.graph
    aliases = Aliases(graph)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    written = frozenset().union(*(aliases.writes(n) for n in graph.nodes if n.op == "call_function"))
    positions = tuple(i for i, n in enumerate(placeholders) if n in written)
    module = for_any_layout(traced.module) if traced.gradients else traced.module
    versions = own_versions(graph)
    cannot_repeat = communicates(graph)
    drawn_from = generators_of(traced) if traced.uses_rng else []
    counted = [
        (i, each.writes) for i, each in enumerate(traced.inputs) if each.writes is not None and each.counter is None
    ]

    def run(args: list[Any]) -> Any:
        if compat.autocast_enabled():
            return compat.without_autocast(run, args)
        with compat.training_kernels():
            saved = [(args[i], _snapshot(args[i])) for i in positions]
            random_states = [generator.get_state() for generator in drawn_from]
            counted_writes = [(args[i], args[i]._version + writes) for i, writes in counted]
            try:
                results = list(module.forward(*args))  # a call would run hooks that the program sets for all modules
                set_own_versions(results, versions)
                for real, version in counted_writes:  # kernels count writes through Tensor.data, autograd does not
                    compat.set_version(real, version)
                return results
            except BaseException as error:
                for real, (size, stride, offset, values) in saved:
                    real.as_strided_(size, stride, offset)
                    if values is None:
                        real.untyped_storage().resize_(0)
                    else:
                        real.copy_(values)
                for generator, state in zip(drawn_from, random_states, strict=True):
                    generator.set_state(state)
                if cannot_repeat and isinstance(error, Exception):
                    raise stopped(error) from error
                raise

    return Executable(
        run,
        atomic=True,
        sources={"graph": str(module.code), "inputs": tuple_text([i.source for i in traced.inputs])},
        seconds={"eager": time.perf_counter() - start},
    )


def _snapshot(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int, torch.Tensor | None]:
    """Returns layout and values of a tensor; ``None`` if its storage is freed, since the graph allocates it first."""
    values = tensor.detach().clone() if compat.has_memory(tensor) else None
    return tensor.shape, tensor.stride(), tensor.storage_offset(), values
