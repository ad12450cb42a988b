"""Records and replays CUDA graphs."""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sidefx_train import torch_compat as compat


class Pool:
    """Memory of recordings, each of which may overwrite the results of the others."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def current_handle(self) -> Any:
        """Returns the allocator's name for the memory; a new one if all graphs are gone, and with them the old."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """Keeps the handle while a graph exists."""
        self._graphs.add(graph)
        _alive.add(graph)


_alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()


@atexit.register
def _reset_graphs() -> None:
    """Destroys the graphs while there still is a device."""
    for graph in list(_alive):
        graph.reset()


class CudaCopyStream:
    """A stream of copies from the host to a device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def wait(self, event: torch.cuda.Event) -> None:
        """Makes later copies wait for an event."""
        self._stream.wait_event(event)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> bool:
        """Issues a copy from pinned memory; other memory is copied to such first. Returns True if it was pinned.

        The allocator of pinned memory reuses none that a copy reads.
        """
        is_pinned = source.is_pinned()
        pinned = source if is_pinned else source.pin_memory()
        with torch.cuda.stream(self._stream):
            to.copy_(pinned, non_blocking=True)
        to.record_stream(self._stream)
        return is_pinned

    def record(self) -> torch.cuda.Event:
        """Returns an event after the copies so far."""
        return self._stream.record_event()


class CudaDevice:
    """One CUDA device, whose recordings are made on one stream.

    Attributes:
        epoch: recordings of an earlier epoch draw from another random state than the program.
        least_prefetched: bytes of a tensor below which a prefetch takes longer than it saves: the driver takes so many
            from pageable memory without waiting.
    """

    least_prefetched = 64 * 1024

    def __init__(self, device: torch.device) -> None:
        self.epoch = 0
        self._device = device
        self._shared = Pool()
        self._stream = torch.cuda.Stream(device)
        self._copies: CudaCopyStream | None = None

    def new_pool(self) -> Pool:
        """Returns a memory pool for recordings, each of which may overwrite the results of the others."""
        return Pool()

    def record(self, run: Callable[[], Sequence[Any]], pool: Pool | None) -> tuple[torch.cuda.CUDAGraph, Sequence[Any]]:
        """Records what ``run`` launches, without executing it; ``None`` is a pool for all recordings of the device.

        Raises:
            RuntimeError: an operation cannot be recorded.
        """
        graph, pool = torch.cuda.CUDAGraph(), pool or self._shared
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                results = self._recorded(graph, pool.current_handle(), run)
            current.wait_stream(self._stream)
        pool.add(graph)
        return graph, results

    def _recorded(self, graph: torch.cuda.CUDAGraph, handle: Any, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        try:
            # Threads that compile in the background may allocate memory meanwhile.
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
            results = run()
            graph.capture_end()
        except BaseException:
            self.epoch += compat.end_broken_capture(graph, self._device.index or 0, handle)
            raise
        return results

    def reserved(self) -> int:
        """Returns how many bytes torch's allocator has reserved on the device."""
        return torch.cuda.memory_reserved(self._device)

    def is_recording(self) -> bool:
        """Returns True if the program records what is launched, in a CUDA graph of its own."""
        return torch.cuda.is_current_stream_capturing()

    def buffer_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns memory of the device with a tensor's layout."""
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)

    def copy_stream(self) -> CudaCopyStream:
        """Returns the device's stream of copies."""
        self._copies = self._copies or CudaCopyStream(self._device)
        return self._copies

    def record_event(self) -> torch.cuda.Event:
        """Returns an event after what the current stream was given so far."""
        return torch.cuda.current_stream(self._device).record_event()

    def read_after(self, event: torch.cuda.Event, memory: Sequence[torch.Tensor]) -> None:
        """Makes the current stream, which will read ``memory``, wait for an event."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in memory:
            tensor.record_stream(current)

    def copy_staged(self, to: torch.Tensor, staged: torch.Tensor) -> torch.Tensor:
        """Copies on the current stream from memory that another stream has filled; returns ``to``."""
        return to.copy_(staged)


@functools.cache
def cuda_device(index: int) -> CudaDevice:
    """Returns the device with this index."""
    return CudaDevice(torch.device("cuda", index))
