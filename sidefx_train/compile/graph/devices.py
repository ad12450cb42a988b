"""Devices of the tensors of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

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
