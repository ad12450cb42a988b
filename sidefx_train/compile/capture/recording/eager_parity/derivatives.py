"""Derivatives that torch computes differently for fake tensors than for CPU tensors, recorded as in eager."""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train import torch_compat as compat

aten = torch.ops.aten
_PICKS = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")
"""Nodes whose gradient goes to selected elements: eager fills it in, for fake tensors torch multiplies by a mask."""


def multiplies_picked(func: Any, args: tuple[Any, ...]) -> bool:
    """Returns True for the product with the mask of selected elements, which makes NaN of non-finite gradients."""
    if func is not aten.mul.Tensor or args[0].dtype is not torch.bool or args[0].device.type != "cpu":
        return False
    return compat.running_node() in _PICKS


def fill_picked(picked: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Returns the gradient at selected elements, and zero elsewhere."""
    return aten.masked_fill.Tensor(aten.new_zeros.default(grad, picked.shape), picked, grad)  # type: ignore[no-any-return]
