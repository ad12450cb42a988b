"""Figures of steps on a CUDA device: host time, launches and memory. On the CPU there is nothing to wait for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

HOST_STEPS = 20

HOST_SECONDS = 0.5
"""Time after which no more of these steps are run."""

PROFILED_STEPS = 2

LAUNCHES = {
    "launches": (
        "cudaLaunchKernel",
        "__cudaLaunchKernel",
        "cudaLaunchCooperativeKernel",
        "cuLaunchKernel",
        "cuLaunchCooperativeKernel",
    ),
    "graph_launches": ("cudaGraphLaunch", "cuGraphLaunch"),
    "copies": ("cudaMemcpy", "cudaMemset", "cuMemcpy", "cuMemset"),
}
"""Beginnings of the names of runtime and driver calls that are counted."""

CALLS = ("cuda", "__cuda", "cuLaunch", "cuGraph", "cuMem", "cuStream", "cuEvent")
"""Beginnings of the names of all calls; those of kernels begin otherwise."""


def missing(device: str) -> str:
    """Returns why nothing can run on a device, or nothing if it can."""
    if device != "cuda" or torch.cuda.is_available():
        return ""
    return f"no CUDA device: torch {torch.__version__} finds none"


def memory_gib(device: str) -> float:
    """Returns the memory of a device of its own; 0 for the CPU."""
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if device == "cuda" else 0.0


def hardware(device: str) -> str:
    """Returns the name of a device."""
    return torch.cuda.get_device_name(0) if device == "cuda" else device


def synchronize(device: str) -> None:
    """Waits until a device has run everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def release_memory(device: str) -> None:
    """Returns unused memory of torch's allocator to the device, for other processes."""
    if device == "cuda":
        torch.cuda.empty_cache()


def host_seconds(step: Callable[[Any], Any], batches: Sequence[Any], device: str) -> float:
    """Returns the median time that a call of a step takes, without waiting for the device.

    The device is idle when a call begins, so only a step of more than about 1000 kernels can fill its queue and wait.
    """
    found: list[float] = []
    synchronize(device)
    until = time.perf_counter() + HOST_SECONDS
    while len(found) < HOST_STEPS and (not found or time.perf_counter() < until):
        began = time.perf_counter()
        step(batches[len(found) % len(batches)])
        found.append(time.perf_counter() - began)
        synchronize(device)
    return statistics.median(found)


def device_memory(step: Callable[[Any], Any], batch: Any) -> dict[str, float]:
    """Returns MiB on the CUDA device.

    Returns:
        ``memory_mb``: peak of allocations since the process began, recording and verification included. ``held_mb``:
        peak of allocations during a step, parameters included; what a CUDA graph keeps for itself does not count.
        ``reserved_mb``: peak of memory taken from the device during a step, CUDA graphs included.
    """
    life = torch.cuda.max_memory_allocated()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step(batch)
    torch.cuda.synchronize()
    held, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"memory_mb": max(life, held) / 2**20, "held_mb": held / 2**20, "reserved_mb": reserved / 2**20}


def launch_counts(step: Callable[[Any], Any], batches: Sequence[Any], device: str) -> dict[str, Any]:
    """Returns calls per step by kind (see :data:`LAUNCHES`), as torch's profiler sees them, and ``calls`` by name."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    synchronize(device)
    with profile(activities=activities) as found:
        for batch in batches[:PROFILED_STEPS]:
            step(batch)
        synchronize(device)
    steps = len(batches[:PROFILED_STEPS])
    calls = {event.key: event.count / steps for event in found.key_averages() if event.key.startswith(CALLS)}
    kinds = {
        kind: sum(count for key, count in calls.items() if key.startswith(beginnings))
        for kind, beginnings in LAUNCHES.items()
    }
    return {**kinds, "calls": calls}
