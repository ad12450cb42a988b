"""Decides whether a step's device section is recorded, and with which device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx

from sidefx_train.compile.gpu.cuda import cuda_device
from sidefx_train.compile.gpu.recording import Device
from sidefx_train.compile.gpu.section import Section, learning_rates_on_device, section_of, why_not
from sidefx_train.compile.gpu.static_replay import StaticReplay
from sidefx_train.compile.graph.artifacts import RunnerPlan
from sidefx_train.config import CompileConfig
from sidefx_train.report import CudaGraphRecord


@dataclass(frozen=True)
class Replaying:
    """How a step's device section is replayed.

    Attributes:
        section: its arguments and results.
        plan: the runner's plan, with what recordings need.
        make: returns what replays the section, from its generated function.
    """

    section: Section
    plan: RunnerPlan
    make: Callable[[Callable[[list[Any]], Any]], StaticReplay]


_on_host: list[Device] = []
"""What records graphs on the CPU: in simulations only."""


@contextmanager
def recording_on_host(device: Device) -> Iterator[None]:
    """Context in which the sections of steps on the CPU are recorded by ``device``."""
    _on_host.append(device)
    try:
        yield
    finally:
        _on_host.pop()


def records_on_host() -> bool:
    """Returns True in a simulation (:func:`recording_on_host`)."""
    return bool(_on_host)


def _device_of(plan: RunnerPlan, config: CompileConfig) -> Device | None:
    if config.cuda_graphs == "off" or callable(config.backend):
        return None
    if plan.device is None:
        return _on_host[-1] if _on_host else None
    wanted = config.backend == "inductor" or config.cuda_graphs == "on"  # the others are references
    return cuda_device(plan.device.index or 0) if wanted and plan.device.type == "cuda" else None


def replaying(
    plan: RunnerPlan, graph: fx.Graph, config: CompileConfig
) -> tuple[Replaying | None, CudaGraphRecord | None]:
    """Returns how the device section of a step is replayed, and what counts its calls.

    Args:
        plan: the runner's plan.
        graph: the functional graph that it calls.
        config: options.

    Returns:
        ``None`` twice for a step without a device that records; ``None`` and the counts for a step that cannot be
        recorded, with the reason.
    """
    device = _device_of(plan, config)
    if device is None:
        return None, None
    record = CudaGraphRecord(refused=why_not(plan, graph))
    if record.refused:
        return None, record
    plan = learning_rates_on_device(plan)
    section = section_of(plan, graph)
    limit, memory = config.cuda_graph_limit, int(config.cuda_graph_memory_mb * 2**20)

    def make(run: Callable[[list[Any]], Any]) -> StaticReplay:
        return StaticReplay(run, section, device, limit, memory, record)

    return Replaying(section, plan, make), record
