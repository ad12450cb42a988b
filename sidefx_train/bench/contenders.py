"""Contenders: the compared ways to run one training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sidefx_train.bench import ranks
from sidefx_train.bench.hand_graph import HandGraph
from sidefx_train.bench.workloads import Batch, Step, Unavailable, Workload, train_step
from sidefx_train.compile.api import compile_step


def eager(workload: Workload) -> Step:
    """The step as people write it, with the fused optimizer."""
    return train_step(workload.model, workload, workload.optimizer(True))


def sidefx(workload: Workload) -> Step:
    """The same step as :func:`eager`, captured, also where that is slower."""
    return compile_step(train_step(workload.model, workload, workload.optimizer(True)), keep_slower=True)


def torch_compile_loss(workload: Workload) -> Step:
    """``torch.compile`` of the loss; the fused optimizer runs eagerly."""
    return _torch_compile(workload, workload.optimizer(True), compile_update=False)


def torch_compile_both(workload: Workload) -> Step:
    """``torch.compile`` of the loss and of the optimizer's step."""
    return _torch_compile(workload, workload.optimizer(False), compile_update=True)


def torch_compile_cuda_graphs(workload: Workload) -> Step:
    """As :func:`torch_compile_loss`, with torch's CUDA graphs."""
    compiled = _torch_compile(workload, workload.optimizer(True), compile_update=False, mode="reduce-overhead")

    def train_step(batch: Batch) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(batch)

    return train_step


def hand_graph(workload: Workload) -> Step:
    """The step of :func:`eager` as one CUDA graph, recorded by hand.

    Raises:
        Unavailable: the workload is not on a CUDA device.
    """
    if not workload.batches[0][0].is_cuda:
        raise Unavailable("CUDA graphs need a CUDA device")
    return HandGraph(
        train_step(workload.model, workload, workload.optimizer(True, capturable=True)), workload.batches[0]
    )


def _torch_compile(workload: Workload, optimizer: Any, compile_update: bool, mode: str | None = None) -> Step:
    compiled_loss = torch.compile(lambda batch: workload.loss(workload.model, batch), mode=mode)
    update = torch.compile(optimizer.step) if compile_update else optimizer.step

    def train_step(batch: Batch) -> torch.Tensor:
        loss = compiled_loss(batch)
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss.detach()

    return train_step


REFERENCE = "eager"

CONTENDERS: dict[str, Callable[[Workload], Step]] = {
    REFERENCE: eager,
    "torch.compile(loss)": torch_compile_loss,
    "torch.compile(loss)+opt": torch_compile_both,
    "reduce-overhead": torch_compile_cuda_graphs,
    "hand-graph": hand_graph,
    "sidefx": sidefx,
}

ON_DEVICE = {
    "cpu": [REFERENCE, "torch.compile(loss)", "torch.compile(loss)+opt", "sidefx"],
    "cuda": [REFERENCE, "torch.compile(loss)", "reduce-overhead", "hand-graph", "sidefx"],
}
"""Contenders that are compared on a device."""


def of(suite: str) -> dict[str, Callable[[Workload], Step]]:
    """Returns the contenders of a suite by name, of whatever device."""
    return ranks.CONTENDERS if suite == ranks.SUITE else CONTENDERS


def compared(suite: str, device: str) -> list[str]:
    """Returns the names of the contenders that are compared in a suite on a device."""
    return list(ranks.CONTENDERS) if suite == ranks.SUITE else ON_DEVICE[device]
