"""Applies storage resizes and storage replacements to real tensors."""

from __future__ import annotations

import torch


def grow(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Applies ``resize_``: enlarges the tensor's storage and sets contents and layout of ``value``.

    Version counters do not change, and other data in that storage stays.
    """
    storage = tensor.untyped_storage()
    storage.resize_(value.numel() * value.itemsize)
    with torch.no_grad():
        whole = torch.empty(0, dtype=value.dtype, device=value.device)
        tensor.data = whole.set_(storage, 0, value.shape, value.stride())
        tensor.data.copy_(value)


def as_inference(value: torch.Tensor) -> torch.Tensor:
    """Returns the same storage as a tensor created in inference mode."""
    with torch.inference_mode():
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        return made.set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())
