"""From a captured graph to a callable, by the backend that the options name.

``runners/`` runs graphs op by op and generates the function around a compiled one, ``inductor.py`` lowers through
Inductor, ``graph_cache.py`` keeps lowered graphs on disk, ``verification/`` compares a compiled graph before it is
trusted.
"""

from __future__ import annotations

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
    """By what the compiled graph is found in the cache; ``None`` for one that cannot be kept."""
    with without(*config.disabled_passes):
        return graph_cache.key_of(traced, config)


def can_be_handed_over(traced: TracedGraph, config: CompileConfig) -> bool:
    """True if another process can compile the graph for this one: its result can be kept, and it is for the CPU."""
    return config.backend == "inductor" and key_of(traced, config) is not None and not torch.cuda.is_initialized()


def hand_over(traced: TracedGraph, config: CompileConfig) -> bool:
    """Compiles a graph for :func:`take` in another process; called in a forked one, which cannot run parallel kernels.

    Returns:
        False if the result is one that cannot be kept, which shows when it is there.

    Raises:
        BackendError: the backend failed.
    """
    measure_in_process()
    try:
        with compat.autocast_off(), without(*config.disabled_passes):
            return lower_for_another(traced, config)
    except BackendError:
        raise
    except Exception as error:
        raise BackendError("SFX201", f"{config.backend_name}: {type(error).__name__}: {error}") from error


def take(traced: TracedGraph, config: CompileConfig, key: str | None = None) -> Executable | None:
    """A graph that is in the cache, by its key if that is known; ``None`` if it has to be compiled."""
    with without(*config.disabled_passes):
        return take_lowered(traced, config, key) if config.backend == "inductor" else None


def is_functionalized_again(traced: TracedGraph, config: CompileConfig) -> bool:
    """True if the compiled graph draws random numbers of its own, so that it is compared with what was lowered."""
    return config.backend == "inductor" and config.rng != "eager" and traced.uses_rng


def reference(
    traced: TracedGraph, config: CompileConfig, functional: FunctionalGraph | None = None
) -> Reference | None:
    """What the compiled graph is compared with; ``None`` if it draws random numbers that nothing else here draws.

    Args:
        traced: the captured graph.
        config: options.
        functional: the graph that was lowered, if it is known; it is changed.
    """
    if not is_functionalized_again(traced, config):
        return captured_reference(traced)
    devices = {getattr(node.meta.get("val"), "device", _CPU) for node in traced.module.graph.nodes}
    if devices != {_CPU}:
        return None
    with compat.autocast_off(), compat.default_device_cpu(), without(*config.disabled_passes):
        return inductor_reference(traced, config, functional)


def build(traced: TracedGraph, config: CompileConfig) -> Executable:
    """Compiles a captured graph with the backend that ``config`` names.

    Raises:
        BackendError: the graph cannot be made functional, or the backend failed; the cause is chained.
    """
    shape_env = traced.fake_mode.shape_env
    known = set(compat.recorded_conditions(shape_env))
    with compat.autocast_off(), without(*config.disabled_passes):  # casts are in the graph already
        executable = _built(traced, config)
    added = [condition for condition in compat.recorded_conditions(shape_env) if condition not in known]
    return replace(executable, conditions=(*executable.conditions, *added))


def _built(traced: TracedGraph, config: CompileConfig) -> Executable:
    backend = config.backend
    try:
        if backend == "eager":
            return build_eager(traced)
        if backend == "aot_eager":
            return build_functional(traced)
        if backend == "inductor":
            return build_inductor(traced, config)
        if callable(backend):
            return build_functional(traced, backend)
    except BackendError:
        raise
    except Exception as error:
        raise BackendError("SFX201", f"{config.backend_name}: {type(error).__name__}: {error}") from error
    raise ValueError(f"backend={backend!r}")
