"""Records and replays CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sidefx_train import torch_compat as compat


class CudaDevice:
    """One CUDA device, whose recordings are made on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def new_pool(self) -> Any:
        """Returns a memory pool for recordings, each of which may overwrite the results of the others."""
        return torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Sequence[Any]], pool: Any) -> tuple[torch.cuda.CUDAGraph, Sequence[Any]]:
        """Records what ``run`` launches, without executing it; ``None`` is a pool for all recordings of the device.

        Raises:
            RuntimeError: an operation cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                results = self._recorded(graph, self._shared if pool is None else pool, run)
            current.wait_stream(self._stream)
        return graph, results

    def _recorded(self, graph: torch.cuda.CUDAGraph, pool: Any, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        # Threads that compile in the background may allocate memory meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            results = run()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:  # the operation invalidated the capture
                compat.end_broken_capture(self._device.index or 0, pool)
            raise
        graph.capture_end()
        return results

    def buffer_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns memory of the device with a tensor's layout."""
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)


@functools.cache
def cuda_device(index: int) -> CudaDevice:
    """Returns the device with this index."""
    return CudaDevice(torch.device("cuda", index))
