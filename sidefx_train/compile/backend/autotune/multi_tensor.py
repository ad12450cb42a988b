"""Chooses by timing between one kernel for many equal updates and the kernels that Inductor generates for them.

Both are timed on the device, without the host's time for launches, on tensors of the same sizes, and must compute the
same. Where nothing can be timed, the updates stay with Inductor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.autotune.timing import (
    MEASURES,
    NotMeasured,
    Task,
    Times,
    fastest,
    timings,
    why_not_measured,
)
from sidefx_train.compile.backend.passes.multi_tensor_groups import Group, find_groups
from sidefx_train.compile.backend.passes.multi_tensor_rewrite import update_module
from sidefx_train.compile.gpu.multi_tensor import MultiTensorUpdate
from sidefx_train.compile.graph.artifacts import FunctionalGraph
from sidefx_train.report import ChoiceRecord

ONE_KERNEL, INDUCTOR = "one kernel", "Inductor"

_ROUNDS = 5

_CYCLES = 20_000_000
"""Cycles of a device, about 10 ms, in which a thousand kernels can be launched."""

_SHARE_OF_MEMORY = 4
"""The tensors of a measurement use at most this fraction of the device's free memory."""

Lower = Callable[[fx.GraphModule], Callable[[list[Any]], Any]]
"""Compiles a graph by Inductor."""


def choose_updates(graph: FunctionalGraph, lower: Lower) -> tuple[list[Group], list[ChoiceRecord]]:
    """Returns the updates of a graph that one kernel computes faster, and what was measured.

    Args:
        graph: the functional graph.
        lower: compiles the other candidate.
    """
    if graph.device is None or graph.device.type != "cuda" or not can_measure():
        return [], []
    tasks: dict[str, Task] = {}
    groups: dict[str, Group] = {}
    for group in find_groups(graph):
        key = _key_of(group, graph.device)
        groups[key], tasks[key] = group, ("multi_tensor", [group, graph.device, lower])
    known = timings(tasks)
    chosen, records = [], []
    for key, group in groups.items():
        times = known.get(key, {})
        best = fastest(times, INDUCTOR)
        if best == ONE_KERNEL:
            chosen.append(group)
        why_not = "" if times else why_not_measured(key)
        records.append(ChoiceRecord(describe(group), 1, 1, best, times, why_not))
    return chosen, records


def can_measure() -> bool:
    """Returns True if this process uses a device: it exists, and is no simulated one."""
    return torch.cuda.is_initialized()


def describe(group: Group) -> str:
    """Returns a group in words."""
    return f"update of {len(group.members)} tensors, {sum(group.sizes)} elements, {len(group.expression.steps)} steps"


def _key_of(group: Group, device: torch.device) -> str:
    text = f"{torch.cuda.get_device_name(device)} {group.expression} {group.sizes}"
    return f"multi_tensor_update {hashlib.sha256(text.encode()).hexdigest()[:24]}"


def measure(group: Group, device: torch.device, lower: Lower) -> Times:
    """Returns the seconds of both candidates.

    Raises:
        NotMeasured: they cannot be measured, or compute different numbers.
    """
    module, written, read = update_module(group)
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    try:
        used, free = sum(value.nbytes for value in values), torch.cuda.mem_get_info(device)[0]
        if used > free // _SHARE_OF_MEMORY:
            raise NotMeasured(f"its tensors have {used / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are free")
        return _times(group, device, lower(module), values, written, read)
    except NotMeasured:
        raise
    except Exception as error:  # the updates stay with Inductor
        raise NotMeasured(f"{type(error).__name__}: {error}") from error


def _times(
    group: Group,
    device: torch.device,
    with_inductor: Callable[[list[Any]], Any],
    values: list[torch.Tensor],
    written: Sequence[int],
    read: Sequence[int],
) -> Times:
    # On a stream of its own: the program may train meanwhile.
    with compat.outside_tracing(), torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(device)):
        mine, others = (_numbers(values, device) for _ in range(2))
        update = MultiTensorUpdate(group.expression, group.sizes)
        targets, sources = [mine[i] for i in written], [mine[i] for i in read]
        update(targets, sources)
        with_inductor(list(others))
        if not all(torch.allclose(mine[i], others[i], 1e-2, 1e-3, equal_nan=True) for i in written):
            raise NotMeasured("both compute different numbers")
        return {
            INDUCTOR: _seconds(lambda: with_inductor(list(others))),
            ONE_KERNEL: _seconds(lambda: update(targets, sources)),
        }


MEASURES["multi_tensor"] = measure


def _numbers(values: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Returns tensors of these layouts, always with the same numbers."""
    tensors = []
    for value in values:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        steps = torch.arange(made.numel(), device=device).remainder(7).add(1).view(made.shape)
        tensors.append(made.copy_(steps / 8 if made.is_floating_point() else steps))
    return tensors


def _seconds(run: Callable[[], Any]) -> float:
    """Returns the device's time for what ``run`` launches.

    The device is kept busy until all is launched: the host's time is no part of it, as in a CUDA graph.
    """
    best = float("inf")
    for _ in range(_ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        compat.occupy_device(_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000)
    return best
