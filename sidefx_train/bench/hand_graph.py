"""A training step recorded by hand as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sidefx_train.bench.workloads import Batch

WARM_UP = 3


class HandGraph:
    """A whole step as one CUDA graph over static inputs, as torch's documentation describes it.

    The first ``WARM_UP`` calls run on a side stream and train; the next one is recorded, which runs nothing, and
    replayed. The returned loss is overwritten by the next call.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture

    Args:
        step: a step that needs no synchronization, with gradients cleared at its end.
        batch: a batch on the device, of the shape of all later ones.
    """

    def __init__(self, step: Callable[[Batch], torch.Tensor], batch: Batch) -> None:
        self._step = step
        self._static = (batch[0].clone(), batch[1].clone())
        self._side = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: torch.Tensor | None = None
        self._calls = 0

    def __call__(self, batch: Batch) -> torch.Tensor:
        for static, value in zip(self._static, batch, strict=True):
            static.copy_(value)
        self._calls += 1
        if self._calls <= WARM_UP:
            return self._run_on_side_stream()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._loss = self._step(self._static)
        self._graph.replay()
        assert self._loss is not None, "a recorded step has a loss"
        return self._loss

    def _run_on_side_stream(self) -> torch.Tensor:
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            loss = self._step(self._static)
        torch.cuda.current_stream().wait_stream(self._side)
        return loss
