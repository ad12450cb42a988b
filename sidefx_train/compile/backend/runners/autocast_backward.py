"""Runs a captured backward under the caller's autocast: operation by operation, with eager's casts.

A backward is captured with autocast off, as most are called. Called under autocast, eager casts the operands of its
operations, and the engine casts the results of each node back to their dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.runners.own_results import own_versions, set_own_versions
from sidefx_train.compile.graph.artifacts import TracedGraph
from sidefx_train.compile.graph.gradient_layouts import for_any_layout


class _Typed(fx.Interpreter):
    """Casts every result to its dtype in the capture."""

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        return _typed(made, n.meta.get("val")) if n.op == "call_function" else made


def _typed(made: Any, captured: Any) -> Any:
    if isinstance(made, (list, tuple)) and isinstance(captured, (list, tuple)):
        return type(made)(_typed(*pair) for pair in zip(made, captured, strict=True))
    both_tensors = isinstance(made, torch.Tensor) and isinstance(captured, torch.Tensor)
    return made.to(captured.dtype) if both_tensors and made.dtype != captured.dtype else made


def build_casting(traced: TracedGraph) -> Callable[[list[Any]], Any]:
    """Returns a function that runs the graph under the current autocast."""
    module = for_any_layout(traced.module)
    versions = own_versions(traced.module.graph)

    def run(args: list[Any]) -> Any:
        with compat.training_kernels(), compat.no_autocast_cache():  # casts made here have no history
            results = list(_Typed(module).run(*args))
        set_own_versions(results, versions)
        return results

    return run
