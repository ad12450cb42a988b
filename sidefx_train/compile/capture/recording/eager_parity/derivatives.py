"""Derivatives that torch computes otherwise on stand-ins than on tensors of the CPU, made as eager makes them."""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train import torch_compat as compat

aten = torch.ops.aten
_PICKS = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")
"""Nodes whose gradient goes to the elements that were picked: eager fills those in, a stand-in's is multiplied."""


def multiplies_picked(func: Any, args: tuple[Any, ...]) -> bool:
    """True for the product with what was picked, which makes NaN of gradients that are not finite."""
    if func is not aten.mul.Tensor or args[0].dtype is not torch.bool or args[0].device.type != "cpu":
        return False
    return compat.running_node() in _PICKS


def fill_picked(picked: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient where an element was picked, and zero elsewhere."""
    return aten.masked_fill.Tensor(aten.new_zeros.default(grad, picked.shape), picked, grad)  # type: ignore[no-any-return]
