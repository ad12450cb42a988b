"""Compiles a captured graph to a callable, with the backend given by the options.

``runners/`` runs graphs op by op and generates the function around a compiled one, ``inductor.py`` lowers through
Inductor, ``graph_cache.py`` caches lowered graphs on disk, ``verification/`` compares a compiled graph before it is
used.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend import graph_cache
from sidefx_train.compile.backend.autotune.timing import measure_in_process
from sidefx_train.compile.backend.inductor import (
    build_inductor,
    inductor_reference,
    lower_for_another,
    take_lowered,
)
from sidefx_train.compile.backend.runners.aot_eager import build_functional
from sidefx_train.compile.backend.runners.autocast_backward import build_casting
from sidefx_train.compile.backend.runners.eager import build_eager
from sidefx_train.compile.backend.verification.reference import Reference, captured_reference
from sidefx_train.compile.common.thread_warnings import no_warnings
from sidefx_train.compile.graph.artifacts import Executable, FunctionalGraph, TracedGraph
from sidefx_train.config import CompileConfig
from sidefx_train.errors import BackendError
from sidefx_train.switches import without

__all__ = [
    "build",
    "build_casting",
    "can_be_handed_over",
    "hand_over",
    "is_functionalized_again",
    "key_of",
    "reference",
    "take",
]

_CPU = torch.device("cpu")


def key_of(traced: TracedGraph, config: CompileConfig) -> str | None:
    """Returns the cache key of the compiled graph; ``None`` if it cannot be cached."""
    with without(*config.disabled_passes):
        return graph_cache.key_of(traced, config)


def can_be_handed_over(traced: TracedGraph, config: CompileConfig) -> bool:
    """Returns True if another process can compile the graph for this one: it can be cached, and is for the CPU."""
    return config.backend == "inductor" and key_of(traced, config) is not None and not torch.cuda.is_initialized()


def hand_over(traced: TracedGraph, config: CompileConfig) -> bool:
    """Compiles a graph for :func:`take` in another process; called in a forked one, which cannot run parallel kernels.

    Returns:
        False if the result cannot be cached, which is known only afterwards.

    Raises:
        BackendError: the backend failed.
    """
    measure_in_process()
    try:
        with no_warnings(), compat.autocast_off(), without(*config.disabled_passes):
            return lower_for_another(traced, config)
    except BackendError:
        raise
    except Exception as error:
        raise BackendError("SFX201", f"{config.backend_name}: {type(error).__name__}: {error}") from error


def take(traced: TracedGraph, config: CompileConfig, key: str | None = None) -> Executable | None:
    """Returns a graph from the cache, by its key if known; ``None`` if it must be compiled."""
    with no_warnings(), without(*config.disabled_passes):
        return take_lowered(traced, config, key) if config.backend == "inductor" else None


def is_functionalized_again(traced: TracedGraph, config: CompileConfig) -> bool:
    """Returns True if the compiled graph draws its own random numbers, so that it is compared with the lowered
    graph."""
    return config.backend == "inductor" and config.rng != "eager" and traced.uses_rng


def reference(
    traced: TracedGraph, config: CompileConfig, functional: FunctionalGraph | None = None
) -> Reference | None:
    """Returns what the compiled graph is compared with; ``None`` if it draws random numbers that cannot be reproduced.

    Args:
        traced: the captured graph.
        config: options.
        functional: the lowered graph, if known; it is changed.
    """
    if not is_functionalized_again(traced, config):
        return captured_reference(traced)
    devices = {getattr(node.meta.get("val"), "device", _CPU) for node in traced.module.graph.nodes}
    if devices != {_CPU}:
        return None
    with no_warnings(), compat.autocast_off(), compat.default_device_cpu(), without(*config.disabled_passes):
        return inductor_reference(traced, config, functional)


def build(traced: TracedGraph, config: CompileConfig) -> Executable:
    """Compiles a captured graph with the backend given by ``config``.

    Raises:
        BackendError: the graph cannot be made functional, or the backend failed; the cause is chained.
    """
    shape_env = traced.fake_mode.shape_env
    known = set(compat.recorded_conditions(shape_env))
    quiet = nullcontext() if callable(config.backend) else no_warnings()  # a callable is code of the program
    with quiet, compat.autocast_depth_kept(), compat.autocast_off(), without(*config.disabled_passes):
        # The casts are in the graph already.
        executable = _built(traced, config)
    added = [condition for condition in compat.recorded_conditions(shape_env) if condition not in known]
    return replace(executable, conditions=(*executable.conditions, *added))


def _built(traced: TracedGraph, config: CompileConfig) -> Executable:
    backend = config.backend
    try:
        if backend == "eager":
            return build_eager(traced)
        if backend == "aot_eager":
            return build_functional(traced, config)
        if backend == "inductor":
            return build_inductor(traced, config)
        if callable(backend):
            return build_functional(traced, config, backend)
    except BackendError:
        raise
    except Exception as error:
        raise BackendError("SFX201", f"{config.backend_name}: {type(error).__name__}: {error}") from error
    raise ValueError(f"backend={backend!r}")
