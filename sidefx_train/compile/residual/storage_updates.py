"""Tensors over other memory than they were made with."""

from __future__ import annotations

import torch


def grow(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """What ``resize_`` leaves: the tensor's memory, enlarged, with the contents and the layout of ``value``.

    Version counters do not move, and what else is in that memory stays in it.
    """
    storage = tensor.untyped_storage()
    storage.resize_(value.numel() * value.itemsize)
    with torch.no_grad():
        whole = torch.empty(0, dtype=value.dtype, device=value.device)
        tensor.data = whole.set_(storage, 0, value.shape, value.stride())
        tensor.data.copy_(value)


def as_inference(value: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor made in inference mode."""
    with torch.inference_mode():
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        return made.set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())
