"""CUDA: captures that failed, and what torch settles at its first use of a device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ["end_broken_capture", "settle_cuda"]


def end_broken_capture(device: int, pool: Any) -> None:
    """Takes back what ``CUDAGraph.capture_end`` leaves behind if the capture was invalidated.

    Upstream: the allocator keeps routing memory to the pool, and the random generators believe in a capture: every draw
    outside of one raises. Seen in torch 2.11.
    """
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # this release has ended it
        pass
    empty = torch.cuda.CUDAGraph()
    empty.capture_begin(capture_error_mode="thread_local")  # a capture that ends well resets the generators
    torch.zeros(1, device=device)
    empty.capture_end()
    empty.reset()


@cache
def settle_cuda() -> None:
    """Lets torch set what it sets at the first use of a device: a capture must not take that for a side effect.

    These are the number of devices, and the order in which attention kernels are tried.
    """
    torch.cuda.device_count()
    query = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="cuda")
    torch._fused_sdp_choice(query, query, query)
