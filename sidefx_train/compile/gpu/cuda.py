"""Records and replays CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sidefx_train import torch_compat as compat


class CudaDevice:
    """One CUDA device: all its recordings share a memory pool and are recorded on one stream.

    They may share it since nothing that a replay leaves in it is read after the next replay of any of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[torch.cuda.CUDAGraph, Sequence[Any]]:
        """Records what ``run`` launches, without executing it.

        Raises:
            RuntimeError: an operation cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            compat.clear_cublas_workspaces()  # one of another stream may not be used, nor one of the pool outside
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    results = _recorded(graph, self._pool, run)
            finally:
                compat.clear_cublas_workspaces()
            current.wait_stream(self._stream)
        return graph, results

    def buffer_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns memory of the device with a tensor's layout."""
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)


def _recorded(graph: torch.cuda.CUDAGraph, pool: Any, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    # Threads that compile in the background may allocate memory meanwhile.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        results = run()
    except BaseException:
        compat.abandon_capture(graph)
        raise
    graph.capture_end()
    return results


@functools.cache
def cuda_device(index: int) -> CudaDevice:
    """Returns the device with this index."""
    return CudaDevice(torch.device("cuda", index))
