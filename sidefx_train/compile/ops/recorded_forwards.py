"""Forwards that autograd records within an operator, so that the operator of the backward runs what was recorded."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np
import torch


class Recorded(NamedTuple):
    """A forward that autograd has recorded.

    Attributes:
        leaves: copies of its arguments that need gradients. A compiled graph may use the memory of an argument again
            and compute another one of the same contents for the backward.
        results: its results.
    """

    leaves: list[torch.Tensor]
    results: tuple[torch.Tensor, ...]


class _Holder(np.ndarray):
    """Memory of a tensor by which a backward finds the recorded forward; both live as long as that memory."""

    recorded: Recorded


_HOLDERS: weakref.WeakValueDictionary[int, _Holder] = weakref.WeakValueDictionary()
"""By address. A copy of such a tensor leads nowhere: the backward then records the forward again."""


def key_of(recorded: Recorded) -> torch.Tensor:
    """Returns a tensor by which a backward finds a recorded forward."""
    holder = np.zeros(1, dtype=np.uint8).view(_Holder)
    holder.recorded = recorded
    key = torch.from_numpy(holder)
    _HOLDERS[key.data_ptr()] = holder
    return key


def recorded_by(key: torch.Tensor) -> Recorded | None:
    """Returns the recorded forward that a tensor leads to, once; ``None`` for a copy of such a tensor."""
    holder = _HOLDERS.pop(key.data_ptr(), None)
    return None if holder is None else holder.recorded


_ALIGNMENT = 64
"""Bytes at whose multiples torch allocates memory on the host."""


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides and alignment: matrix products round by both."""
    if 0 in tensor.stride() or not tensor.numel():
        return tensor.detach().clone()
    size = tensor.element_size()
    offset = tensor.data_ptr() % _ALIGNMENT // size
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.new_empty(offset + extent)
    return memory.as_strided(tensor.shape, tensor.stride(), offset).copy_(tensor).detach()
