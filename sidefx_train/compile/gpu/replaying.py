"""Decides whether a step's device section is recorded, and with which device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from sidefx_train.compile.gpu.cuda import cuda_device
from sidefx_train.compile.gpu.prefetch import LoopPrefetch, Prefetcher
from sidefx_train.compile.gpu.recording import Device
from sidefx_train.compile.gpu.section import learning_rates_on_device, section_of, why_not
from sidefx_train.compile.gpu.static_replay import StaticReplay
from sidefx_train.compile.graph.artifacts import RunnerPlan
from sidefx_train.config import CompileConfig
from sidefx_train.report import CudaGraphRecord, PrefetchRecord


class Replaying:
    """How a step's device section is replayed.

    Args:
        plan: the runner's plan.
        graph: the functional graph that it calls.
        device: what records.
        config: options.
        record: counts calls.

    Attributes:
        plan: the runner's plan, with what recordings need.
        section: its arguments and results.
        device: what records.
        batch: sources of the inputs that a replay copies to the device.
    """

    def __init__(
        self, plan: RunnerPlan, graph: fx.Graph, device: Device, config: CompileConfig, record: CudaGraphRecord
    ) -> None:
        self.plan = learning_rates_on_device(plan)
        self.section = section_of(self.plan, graph)
        copied = [name for name, role in zip(self.section.names, self.section.roles, strict=True) if role == "input"]
        self.batch = tuple(plan.inputs[int(name[1:])].source for name in copied)
        self.device, self._config, self._record = device, config, record
        self._replay: StaticReplay | None = None

    @property
    def can_replay(self) -> bool:
        """Returns True if there is a recording."""
        return self._replay is not None and self._replay.can_replay

    def take_from(self, prefetcher: Prefetcher) -> None:
        """Lets replays take copies of inputs that ``prefetcher`` has on the device."""
        assert self._replay is not None, "the runner has been generated"
        self._replay.prefetcher = prefetcher

    def make(self, run: Callable[[list[Any]], Any], drawn_from: Sequence[torch.Generator]) -> StaticReplay:
        """Returns what replays the section.

        Args:
            run: the generated function.
            drawn_from: generators whose state is restored if it fails.
        """
        limit, memory = self._config.cuda_graph_limit, int(self._config.cuda_graph_memory_mb * 2**20)
        self._replay = StaticReplay(run, self.section, self.device, limit, memory, self._record, drawn_from)
        return self._replay

    def hand_out(self, gradients: dict[int, int]) -> None:
        """Lets results be written by every replay that the program gets only as the gradient of an input.

        Args:
            gradients: position of the input, by position of the output.
        """
        assert self._replay is not None, "the runner has been generated"
        named = Counter(str(out.value) for out in self.plan.outputs if out.kind == "result")
        results: dict[int, int] = {}
        for output, position in gradients.items():
            name, holder = str(self.plan.outputs[output].value), f"a{position}"
            if name.startswith("r") and named[name] == 1 and holder in self.section.names:
                results[int(name[1:])] = self.section.names.index(holder)
        self._replay.hand_out(results)


_on_host: list[Device] = []
"""What records in place of a device: in simulations only."""


@contextmanager
def recording_on_host(device: Device) -> Iterator[None]:
    """Context in which sections are recorded by ``device``, those of steps on the CPU too."""
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
    if _on_host:
        return _on_host[-1]
    wanted = config.backend == "inductor" or config.cuda_graphs == "on"  # "eager" and "aot_eager" are references
    if plan.device is None or plan.device.type != "cuda" or not wanted:
        return None
    return cuda_device(plan.device.index or 0)


def loop_prefetch(device: torch.device, record: PrefetchRecord) -> LoopPrefetch | None:
    """Returns what prefetches the batches of a loop that moves them to ``device``; ``None`` on the CPU."""
    if _on_host:
        return LoopPrefetch(_on_host[-1], record)
    if device.type != "cuda":
        return None
    return LoopPrefetch(cuda_device(torch.cuda.current_device() if device.index is None else device.index), record)


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
    return Replaying(plan, graph, device, config, record), record
