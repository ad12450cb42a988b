"""Copies the next batch to the device while a step runs there.

A replay reads its batch from static buffers. Copied by the replay itself, a batch waits on the replay's stream until
the step before has finished, and then keeps the device from computing. A prefetch copies it on a stream of its own,
from pinned memory, to *staging* memory. The next replay copies from there to its buffers, which takes no bus.

===================  =======================  =================================================
event                recorded on              waited for by
===================  =======================  =================================================
filled               the stream of copies     the stream of the replay, before it reads staging
consumed             the stream of the replay the stream of copies, before it overwrites staging
===================  =======================  =================================================

So an input has two static buffers, one that the recording reads and one that is filled meanwhile. The alternative, a
recording for each of two buffers without the copy between them, was rejected:

- Memory: each recording has its own results. Gradients that a program keeps are written by every replay where the
  program has them; two recordings have twice the memory of all gradients. Staging takes one batch.
- Recording: each takes a run of the step's Python, its launches and their instantiation, for every combination of sizes
  and numbers; and staging does not depend on which recording is replayed next.
- The copy of a batch of 100 MB takes 0.1 ms at 2 TB/s of a device's memory; the bus to the host takes 4 ms at 25 GB/s.

A copy is used for the tensor that was prefetched, if that has the same version counter and address as then. Every other
tensor is copied as without a prefetch. What changes memory without counting (NumPy, ``Tensor.data``) is not seen.

Checked on a simulated device only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sidefx_train.compile.graph.strided_layout import is_dense
from sidefx_train.report import PrefetchRecord

ANOTHER = "the step was called with another batch"
REPLACED = "a tensor of the batch was replaced after the prefetch"
CHANGED = "the batch was changed in place after the prefetch"
NOT_REPLAYED = "the step ran without replaying a recording"
SUPERSEDED = "no step was called before the next prefetch"
PROGRAM_RECORDS = "the program records the step itself"


class Event(Protocol):
    """A point of a stream."""

    def synchronize(self) -> None:
        """Makes the host wait until the stream has got there."""


class CopyStream(Protocol):
    """A stream of copies from the host, beside those on which steps run."""

    def wait(self, event: Any) -> None:
        """Makes later copies wait for an event."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> bool:
        """Issues a copy from the host, without waiting.

        Returns:
            True if it reads the memory of ``source``, until an event that is recorded later; False if that may change.
        """

    def record(self) -> Any:
        """Returns an event after the copies so far."""


class StagingDevice(Protocol):
    """What a device does for prefetching.

    Attributes:
        least_prefetched: bytes of a tensor below which a prefetch takes longer than it saves.
    """

    least_prefetched: int

    def copy_stream(self) -> CopyStream:
        """Returns a stream of copies."""

    def buffer_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns memory of the device with a tensor's layout."""

    def record_event(self) -> Any:
        """Returns an event after what the current stream was given so far."""

    def read_after(self, event: Any, memory: Sequence[torch.Tensor]) -> None:
        """Makes the current stream, which will read ``memory``, wait for an event."""

    def copy_staged(self, to: torch.Tensor, staged: torch.Tensor) -> torch.Tensor:
        """Copies on the current stream from memory that another stream has filled; returns ``to``."""

    def is_recording(self) -> bool:
        """Returns True if the program records what is launched."""


@dataclass
class _Staging:
    """Memory for one batch.

    Attributes:
        buffers: the memory, by tensor.
        consumed: after what has read it.
    """

    buffers: list[torch.Tensor]
    consumed: Any


@dataclass(frozen=True)
class _Copy:
    """A tensor that was prefetched.

    Attributes:
        tensor: the tensor on the host.
        version: its version counter before the copy.
        address: where its memory was.
        staged: the copy.
        reads_program: the copy reads the program's own memory.
    """

    tensor: torch.Tensor
    version: int
    address: int
    staged: torch.Tensor
    reads_program: bool

    def is_current(self) -> bool:
        return self.tensor._version == self.version and self.tensor.data_ptr() == self.address


@dataclass(frozen=True)
class _Pending:
    """A batch that was prefetched and not used yet."""

    staging: _Staging
    filled: Any
    copies: dict[int, _Copy]


class Prefetcher:
    """Prefetches batches, one at a time.

    Args:
        device: where to.
        record: counts.
        limit: number of layouts of batches for which memory is kept.
    """

    def __init__(self, device: StagingDevice, record: PrefetchRecord, limit: int = 8) -> None:
        self._device, self._record, self._limit = device, record, limit
        self._stream: CopyStream | None = None
        self._stagings: OrderedDict[Any, _Staging] = OrderedDict()
        self._pending: _Pending | None = None

    def prefetch(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Begins to copy the next batch; returns True if any of its tensors is copied.

        Where memory is lacking, nothing is prefetched any more: training goes on as without.
        """
        self.drop(SUPERSEDED)
        if self._record.refused:
            return False
        wanted = list({id(each): each for each in tensors if _is_plain(each, self._device.least_prefetched)}.values())
        if not wanted:
            return False
        if self._device.is_recording():
            self._record.drop(PROGRAM_RECORDS)
            return False
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._pending = self._begin(wanted)
        except RuntimeError as error:
            self._stagings.clear()
            self._record.refused = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return False
        self._record.prefetched += 1
        return True

    def _begin(self, tensors: list[torch.Tensor]) -> _Pending:
        stream = self._stream = self._stream or self._device.copy_stream()
        staging = self._staging_for(tensors)
        copies = {}
        stream.wait(staging.consumed)
        for tensor, staged in zip(tensors, staging.buffers, strict=True):
            version, address = tensor._version, tensor.data_ptr()
            copies[id(tensor)] = _Copy(tensor, version, address, staged, stream.copy(staged, tensor.detach()))
        return _Pending(staging, stream.record(), copies)

    def _staging_for(self, tensors: list[torch.Tensor]) -> _Staging:
        layouts = tuple((each.shape, each.stride(), each.dtype) for each in tensors)
        staging = self._stagings.pop(layouts, None)
        if staging is None:
            if len(self._stagings) >= self._limit:
                _, oldest = self._stagings.popitem(last=False)
                oldest.consumed.synchronize()
            buffers = [self._device.buffer_like(each) for each in tensors]
            # Memory that was freed may still be in use by the current stream.
            staging = _Staging(buffers, self._device.record_event())
        self._stagings[layouts] = staging
        return staging

    @contextmanager
    def staged(
        self, tensors: Sequence[torch.Tensor], waits: Collection[int] = ()
    ) -> Iterator[list[torch.Tensor | None]]:
        """Context in which the current stream may be given what reads the copies of tensors.

        Args:
            tensors: tensors on the host; copies of others are dropped.
            waits: positions of those that the program may change right after the step.

        Yields:
            The copy of each tensor, to be read by ``copy_staged``; ``None`` where there is none.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            yield [None] * len(tensors)
            return
        found = [pending.copies.get(id(each)) for each in tensors]
        current = [each if each is not None and each.is_current() else None for each in found]
        self._count(pending, found, current)
        used = [each.staged for each in current if each is not None]
        if not used:
            yield [None] * len(tensors)
            return
        self._device.read_after(pending.filled, used)
        try:
            yield [None if each is None else each.staged for each in current]
        finally:
            pending.staging.consumed = self._device.record_event()
        if any(each is not None and each.reads_program and i in waits for i, each in enumerate(current)):
            pending.filled.synchronize()

    def _count(self, pending: _Pending, found: list[_Copy | None], current: list[_Copy | None]) -> None:
        if {id(each) for each in current if each is not None} == {id(each) for each in pending.copies.values()}:
            self._record.used += 1
        elif not any(each is not None for each in found):
            self._record.drop(ANOTHER)
        else:
            changed = any(each is not None and not each.is_current() for each in found)
            self._record.drop(CHANGED if changed else REPLACED)

    def drop(self, reason: str) -> None:
        """Forgets a batch that was prefetched and not used, if there is one."""
        if self._pending is not None:
            self._pending = None
            self._record.drop(reason)


def _is_plain(value: Any, least: int) -> bool:
    """Returns True for a tensor of the host that can be copied as it lies in memory, and is worth it."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and value.nbytes >= max(least, 1)
        and not (value.requires_grad or value.is_inference() or value.is_conj() or value.is_neg())
        and is_dense(value)
    )


class LoopPrefetch:
    """Prefetches the batches of a loop that moves them to the device before the step.

    Args:
        device: where to.
        record: counts.
    """

    def __init__(self, device: StagingDevice, record: PrefetchRecord) -> None:
        self._device, self._prefetcher = device, Prefetcher(device, record)

    def prefetch(self, batch: Any) -> bool:
        """Begins to copy the tensors of the next batch; returns True if there are any."""
        return self._prefetcher.prefetch(list(_tensors(batch)))

    def moved(self, batch: Any) -> Any:
        """Returns a batch with new tensors on the device in place of those that were prefetched; the rest stays."""
        tensors = list(_tensors(batch))
        with torch.no_grad(), self._prefetcher.staged(tensors) as copies:
            new = {
                id(tensor): self._device.copy_staged(self._device.buffer_like(staged), staged)
                for tensor, staged in zip(tensors, copies, strict=True)
                if staged is not None
            }
        return _replaced(batch, new) if new else batch

    def drop(self, reason: str) -> None:
        """Forgets a batch that was prefetched and not used, if there is one."""
        self._prefetcher.drop(reason)


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested lists, tuples and dicts."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif type(batch) in (list, tuple, dict):
        for item in batch.values() if type(batch) is dict else batch:
            yield from _tensors(item)


def _replaced(batch: Any, new: dict[int, torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return new.get(id(batch), batch)
    if type(batch) is dict:
        return {key: _replaced(item, new) for key, item in batch.items()}
    return type(batch)([_replaced(item, new) for item in batch]) if type(batch) in (list, tuple) else batch
