"""CUDA: captures that failed, a kernel that only takes time, what torch settles at its first use of a device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ["end_broken_capture", "occupy_device", "settle_cuda"]


def end_broken_capture(graph: torch.cuda.CUDAGraph, device: int, pool: Any) -> bool:
    """Takes back what a capture leaves behind that did not begin, or in which an operation failed.

    Upstream: the allocator keeps routing memory to the pool, and the random generators believe in a capture: every draw
    outside of one raises. Seen in torch 2.11.

    Returns:
        True if graphs recorded before draw from another state than the generator has now.
    """
    for end in (graph.capture_end, lambda: torch._C._cuda_endAllocateToPool(device, pool)):
        try:
            end()
        except RuntimeError:  # it says that the capture was invalidated, or there is none any more
            continue
    generator = torch.cuda.default_generators[device]
    if _draws(generator):
        return False
    generator.graphsafe_set_state(generator.clone_state())  # a new state with the same numbers
    return True


def _draws(generator: torch.Generator) -> bool:
    """Returns True if numbers can be drawn; the state stays."""
    before = generator.get_state()
    try:
        torch.empty(1, device=generator.device).normal_(generator=generator)
    except RuntimeError:
        return False
    generator.set_state(before)
    return True


@cache
def settle_cuda() -> None:
    """Lets torch set what it sets at the first use of a device: a capture must not take that for a side effect.

    These are the number of devices, and the order in which attention kernels are tried.
    """
    torch.cuda.device_count()
    query = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="cuda")
    torch._fused_sdp_choice(query, query, query)


def occupy_device(cycles: int) -> None:
    """Launches a kernel that does nothing for a number of the device's cycles."""
    torch.cuda._sleep(cycles)
