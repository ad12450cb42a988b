"""Devices of the tensors of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from sidefx_train.compile.graph.artifacts import TracedGraph
from sidefx_train.compile.graph.fx_utils import generators

_HOST = ("cpu", "meta")


def is_on_accelerator(value: Any) -> bool:
    """Returns True for a tensor whose kernels run beside the host."""
    return isinstance(value, torch.Tensor) and value.device.type not in _HOST


def accelerator_of(graph: fx.Graph) -> torch.device | None:
    """Returns the first accelerator on which a graph has an input or a result; ``None`` if it runs on the CPU."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if is_on_accelerator(each):
                return each.device  # type: ignore[no-any-return]
    return None


def generators_of(traced: TracedGraph) -> list[torch.Generator]:
    """Returns the random generators that a graph may draw from: torch's own, of the accelerators too, and others."""
    device = accelerator_of(traced.module.graph)
    of_device = []
    if device is not None and device.type == "cuda" and torch.cuda.is_initialized():
        of_device = [torch.cuda.default_generators[device.index or 0]]
    return [torch.default_generator, *of_device, *generators(traced.module)]
