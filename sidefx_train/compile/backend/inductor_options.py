"""Inductor's settings for one compilation."""

from __future__ import annotations

from typing import Any

from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.passes.work_size import is_tiny
from sidefx_train.compile.graph.artifacts import FunctionalGraph
from sidefx_train.compile.graph.collectives import communicates
from sidefx_train.compile.ops.collectives import BARRIER
from sidefx_train.config import CompileConfig

_SERIAL_BELOW = 8192
"""Elements per thread below which entering a parallel region costs more than it saves."""


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
