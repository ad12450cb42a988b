"""Plays the device for the replay of recorded steps: records operators on CPU tensors, and runs them again.

It keeps to what a CUDA graph knows: addresses and plain arguments from the time of the recording. It raises where a
replay on a device would be silently wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.gpu.multi_tensor import MULTI_TENSOR_UPDATE
from sidefx_train.compile.gpu.recording import storage_begin
from sidefx_train.compile.gpu.section import waits_for_device
from sidefx_train.compile.gpu.simulation.streams import MAIN, HostCopyStream, HostEvent, StreamOrder


class StaleAddress(AssertionError):
    """A replay reads or writes memory that was freed, or that has moved, since it was recorded."""


@dataclass(frozen=True)
class _Outside:
    """A tensor that was made before the recording: its storage is not kept alive."""

    storage: Any
    address: int
    dtype: torch.dtype
    layout: tuple[tuple[int, ...], tuple[int, ...], int]

    def tensor(self) -> torch.Tensor:
        storage = compat.storage_behind(self.storage)
        if storage is None:
            raise StaleAddress("a replay uses a tensor that was freed after it was recorded")
        if storage.data_ptr() != self.address:
            raise StaleAddress("a replay uses a tensor whose memory has moved since it was recorded")
        size, stride, offset = self.layout
        return torch.empty(0, dtype=self.dtype).set_(storage, offset, size, stride)


class _Recorder(compat.TorchDispatchMode):
    """Runs operators and keeps them, with the contents of what they write from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.own: dict[int, torch.Tensor] = {}
        self.saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits_for_device(func):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func._schema.name}")
        self._save(func, args, kwargs)
        out = func(*args, **kwargs) if func is not MULTI_TENSOR_UPDATE else None  # its table is filled later
        given = {storage_begin(each) for each in _tensors((args, kwargs))}
        made = [each for each in _tensors(out) if storage_begin(each) not in given]
        for each in made:
            self.own[storage_begin(each)] = each.detach()
        is_view = not made and not any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        if not is_view:
            self.calls.append((func, self._weak(args), self._weak(kwargs), made))
        return out

    def _save(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keeps the contents of memory from outside before the first write: a recording executes nothing."""
        arguments = func._schema.arguments
        given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
        for each in arguments:
            if not (each.alias_info and each.alias_info.is_write and each.name in given):
                continue
            for tensor in _tensors(given[each.name]):
                begin = storage_begin(tensor)
                if begin not in self.own and begin not in self.saved:
                    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                    self.saved[begin] = (whole, whole.clone())

    def _weak(self, value: Any) -> Any:
        def weak(each: Any) -> Any:
            if not isinstance(each, torch.Tensor) or storage_begin(each) in self.own:
                return each
            storage = each.untyped_storage()
            layout = (tuple(each.shape), tuple(each.stride()), each.storage_offset())
            return _Outside(compat.weak_storage(storage), storage.data_ptr(), each.dtype, layout)

        return fx.node.map_aggregate(value, weak)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for each in value for t in _tensors(each)] if isinstance(value, (list, tuple)) else []


class RecordedCalls:
    """What a recording launches."""

    def __init__(self, recorder: _Recorder, pool: weakref.WeakSet[RecordedCalls], order: StreamOrder) -> None:
        self._calls, self._own = recorder.calls, list(recorder.own.values())
        self._pool, self._order = pool, order
        pool.add(self)

    def replay(self) -> None:
        """Runs the recorded operators on the recorded addresses; everything in the pool is overwritten first."""
        with torch.no_grad(), compat.below_autograd():
            for memory in [each for recorded in self._pool for each in recorded._own]:
                memory.fill_(float("nan") if memory.is_floating_point() else 1)
            for func, args, kwargs, made in self._calls:
                for address in _outside((args, kwargs)):
                    self._order.touches(MAIN, address, writes=False)
                out = func(*fx.node.map_aggregate(args, _strong), **fx.node.map_aggregate(kwargs, _strong))
                if made:
                    for old, new in zip(made, _tensors(out), strict=True):
                        old.copy_(new)


def _outside(value: Any) -> list[int]:
    """Returns the addresses of tensors from outside in nested arguments."""
    if isinstance(value, _Outside):
        return [value.address]
    if isinstance(value, dict):
        value = list(value.values())
    return [a for each in value for a in _outside(each)] if isinstance(value, (list, tuple)) else []


def _strong(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Outside) else value


class HostRecorder:
    """A device for :func:`~sidefx_train.compile.gpu.replaying.recording_on_host`.

    Args:
        pinned: whether the program's tensors are in pinned memory, which a copy reads late.

    Attributes:
        pinned: the same.
        recordings: number of recordings made.
        epoch: recordings of an earlier epoch draw from another random state than the program.
        least_prefetched: bytes of the smallest tensor that is prefetched.
        order: which accesses to memory two streams have put in order.
    """

    def __init__(self, pinned: bool = True) -> None:
        self.recordings = self.epoch = self._reserved = self.least_prefetched = 0
        self.order, self.pinned = StreamOrder(), pinned
        self._shared: weakref.WeakSet[RecordedCalls] = weakref.WeakSet()

    def new_pool(self) -> weakref.WeakSet[RecordedCalls]:
        """Returns a memory pool for recordings, each of which overwrites the results of the others."""
        return weakref.WeakSet()

    def record(
        self, run: Callable[[], Sequence[Any]], pool: weakref.WeakSet[RecordedCalls] | None
    ) -> tuple[RecordedCalls, Sequence[Any]]:
        """Records the operators that ``run`` calls; what they write outside, and draw, is undone."""
        recorder = _Recorder()
        state = torch.get_rng_state()
        try:
            with recorder:
                results = run()
        finally:
            torch.set_rng_state(state)
            for whole, contents in recorder.saved.values():
                whole.copy_(contents)
        self.recordings += 1
        self._reserved += sum(memory.nbytes for memory in recorder.own.values())
        return RecordedCalls(recorder, self._shared if pool is None else pool, self.order), results

    def reserved(self) -> int:
        """Returns the bytes of all tensors of recordings."""
        return self._reserved

    def is_recording(self) -> bool:
        """Returns False: nothing else records operators of the host."""
        return False

    def buffer_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns memory with a tensor's layout."""
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        self.order.allocated(MAIN, storage_begin(made))
        return made

    def copy_stream(self) -> HostCopyStream:
        """Returns a stream whose copies happen when they are waited for, and not earlier."""
        return HostCopyStream(self.order, self.pinned)

    def record_event(self) -> HostEvent:
        """Returns an event after what the current stream was given so far."""
        return self.order.event(MAIN)

    def read_after(self, event: HostEvent, memory: Sequence[torch.Tensor]) -> None:
        """Makes the current stream, which will read ``memory``, wait for an event."""
        self.order.waits(MAIN, event)
        event.finish()

    def copy_staged(self, to: torch.Tensor, staged: torch.Tensor) -> torch.Tensor:
        """Copies on the current stream from memory that another stream has filled; returns ``to``.

        Raises:
            MissingWait: it has not waited for what fills the memory.
        """
        self.order.touches(MAIN, storage_begin(staged), writes=False)
        self.order.touches(MAIN, storage_begin(to), writes=True)
        return to.copy_(staged)
