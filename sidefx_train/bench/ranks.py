"""Several processes that train one model together: the contenders, and how the first process leads the others.

The first is measured as every contender is. Before it runs steps, it tells the others how many; each runs as many.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sidefx_train.bench.workloads import Batch, Step, Workload, train_step
from sidefx_train.compile.api import compile_step

SUITE = "distributed"

PROCESSES = 2

TIMEOUT = timedelta(seconds=300)
"""Longest time that a process waits for another, which may compile."""

PROFILED_STEPS = 5

SCALING = (8, 64, 512)
"""Numbers of processes for which the communication of a step is computed."""


def ddp(workload: Workload) -> Step:
    """``DistributedDataParallel`` with the fused optimizer."""
    return train_step(DistributedDataParallel(workload.model), workload, workload.optimizer(True))


def compiled_ddp(workload: Workload) -> Step:
    """``torch.compile`` of the wrapped model's loss; the fused optimizer runs eagerly."""
    model = DistributedDataParallel(workload.model)
    compiled = torch.compile(lambda batch: workload.loss(model, batch))
    return train_step(model, replace(workload, loss=lambda _, batch: compiled(batch)), workload.optimizer(True))


def fsdp2(workload: Workload) -> Step:
    """``fully_shard`` of each block and of the model, with the fused optimizer where torch has one for DTensors."""
    from torch.distributed.fsdp import fully_shard

    for block in getattr(workload.model, "blocks", ()):
        fully_shard(block)
    fully_shard(workload.model)
    optimizer = workload.optimizer(True)
    if isinstance(optimizer, torch.optim.SGD):  # "aten._fused_sgd_ does not have a sharding strategy registered"
        optimizer = workload.optimizer(False)
    return train_step(workload.model, workload, optimizer)


def sidefx(workload: Workload) -> Step:
    """The step of :func:`ddp`, captured."""
    return compile_step(ddp(workload), keep_slower=True)


def sidefx_fsdp2(workload: Workload) -> Step:
    """The step of :func:`fsdp2`, captured."""
    return compile_step(fsdp2(workload), keep_slower=True)


CONTENDERS: dict[str, Callable[[Workload], Step]] = {
    "eager": ddp,
    "torch.compile(ddp)": compiled_ddp,
    "fsdp2": fsdp2,
    "sidefx": sidefx,
    "sidefx(fsdp2)": sidefx_fsdp2,
}


def join(rank: int, meeting: Path) -> None:
    """Joins the process group of a contender on the CPU."""
    where = f"file://{meeting}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=PROCESSES, timeout=TIMEOUT)


def of_rank(workload: Workload, rank: int) -> Workload:
    """Returns a workload whose processes have different batches at every step."""
    batches = workload.batches
    return replace(workload, batches=batches[rank:] + batches[:rank])


class Others:
    """The other processes of a group: they repeat what this one does.

    Args:
        arguments: command line of the worker, to which each one's rank is added; none: there are no other processes.
    """

    def __init__(self, arguments: list[str] | None = None) -> None:
        command = [sys.executable, "-m", "sidefx_train.bench.worker", *(arguments or []), "--rank"]
        ranks = range(1, PROCESSES if arguments else 1)
        self._processes = [
            subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=sys.stderr) for rank in ranks
        ]

    def __bool__(self) -> bool:
        return bool(self._processes)

    def run(self, count: int) -> None:
        """Has the others run steps, while this process runs as many."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: the next collective raises
                process.stdin.write(f"{count}\n".encode())
                process.stdin.flush()

    def end(self) -> None:
        """Ends the others."""
        for process in self._processes:
            process.kill()
            process.communicate()


def follow(step: Step, batches: list[Batch], done: int) -> None:
    """Runs as many steps as the first process says, until it ends."""
    for line in sys.stdin:
        for _ in range(int(line)):
            step(batches[done % len(batches)])
            done += 1


def communication(step: Step, batch: Batch, others: Others) -> dict[str, Any]:
    """Returns the time that collectives take, and what the report of a captured step says about them.

    Returns:
        ``communication_s``: seconds of a step from the start of a collective to its end, waiting for others included.
        ``hidden``: the part of it in which the program did not wait; only where waits are operators.
        ``sent_mb``: MiB that each process sends in a step, by a ring. ``scaling``: the same for other numbers of
        processes, with the number of messages.
    """
    from torch.profiler import ProfilerActivity, profile

    from sidefx_train.communication import scaling

    others.run(PROFILED_STEPS)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(PROFILED_STEPS):
            step(batch)
    events = found.key_averages()
    sent = sum(event.cpu_time_total for event in events if event.key.startswith("gloo:"))
    waits = [event.cpu_time_total for event in events if event.key == "_c10d_functional::wait_tensor"]
    figures: dict[str, Any] = {"communication_s": sent / PROFILED_STEPS / 1e6}
    if waits and sent:
        figures["hidden"] = max(0.0, 1 - sum(waits) / sent)
    if hasattr(step, "report"):
        costs = scaling(step.report().communication, [PROCESSES, *SCALING])
        figures["sent_mb"] = costs[0].sent / 2**20
        figures["scaling"] = [(cost.ranks, cost.sent / 2**20, cost.messages) for cost in costs]
    return figures
