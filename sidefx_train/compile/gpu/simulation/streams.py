"""Plays the streams of a device: copies happen as late as they may, and every access must be in order.

Work of two streams is in order only by events. So the recorder keeps for every stream how far it has waited for each
other one (a vector clock), and for memory who touched it last, and when. An access without such a wait between it and
the one before raises, whatever would have happened first on a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sidefx_train.compile.gpu.recording import storage_begin

MAIN = 0
"""The stream that steps run on."""


class MissingWait(AssertionError):
    """A stream touches memory that another one may not have finished with."""


@dataclass(frozen=True)
class HostEvent:
    """A point of a stream.

    Attributes:
        seen: how far each stream had got that the stream has waited for, itself included.
        finish: lets the stream get there.
    """

    seen: dict[int, int]
    finish: Callable[[], None]

    def synchronize(self) -> None:
        """Makes the host wait until the stream has got there."""
        self.finish()


@dataclass
class _Accesses:
    """The last write of each stream to one memory, and its last read."""

    written: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)


class StreamOrder:
    """Which work of streams is in order."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, int]] = defaultdict(dict)
        self._memory: dict[int, _Accesses] = {}
        self._streams = 1

    def new_stream(self) -> int:
        """Returns a stream."""
        self._streams += 1
        return self._streams - 1

    def event(self, stream: int, finish: Callable[[], None] = lambda: None) -> HostEvent:
        """Returns an event after what a stream was given so far."""
        return HostEvent(dict(self._seen[stream]), finish)

    def waits(self, stream: int, event: HostEvent) -> None:
        """Makes a stream wait for an event."""
        seen = self._seen[stream]
        for other, count in event.seen.items():
            seen[other] = max(seen.get(other, 0), count)

    def allocated(self, stream: int, address: int) -> None:
        """Notes new memory, which what the stream was given before may still read."""
        self._memory[address] = _Accesses(read={stream: self._step(stream)})

    def touches(self, stream: int, address: int, writes: bool) -> None:
        """Notes an access to memory that a device has allocated.

        Raises:
            MissingWait: it is in no order with an earlier one.
        """
        memory = self._memory.get(address)
        if memory is None:
            return
        now = self._step(stream)
        self._check(stream, memory.written, "has not been filled yet")
        if writes:
            self._check(stream, memory.read, "is still read by what was launched before")
        (memory.written if writes else memory.read)[stream] = now

    def _check(self, stream: int, earlier: dict[int, int], what: str) -> None:
        seen = self._seen[stream]
        if any(seen.get(other, 0) < when for other, when in earlier.items() if other != stream):
            raise MissingWait(f"a stream touches memory that {what}: it has not waited for the stream that does")

    def _step(self, stream: int) -> int:
        seen = self._seen[stream]
        seen[stream] = seen.get(stream, 0) + 1
        return seen[stream]


class HostCopyStream:
    """A stream whose copies happen when they are waited for, and not earlier.

    Args:
        order: the order of all streams.
        pinned: the memory of the program is pinned: a copy reads it when it happens. Other memory is read at once.
    """

    def __init__(self, order: StreamOrder, pinned: bool) -> None:
        self._order, self._pinned, self._stream = order, pinned, order.new_stream()
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []

    def wait(self, event: HostEvent) -> None:
        """Makes later copies wait for an event."""
        self._order.waits(self._stream, event)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> bool:
        """Issues a copy; until it happens, the memory has numbers that are no batch's.

        Raises:
            MissingWait: the memory is still read.
        """
        self._order.touches(self._stream, storage_begin(to), writes=True)
        to.fill_(float("nan") if to.is_floating_point() else 1)
        self._queue.append((to, source if self._pinned else source.clone()))
        return self._pinned

    def record(self) -> HostEvent:
        """Returns an event after the copies so far."""
        count = len(self._queue)
        mine = self._queue[:count]

        def finish() -> None:
            for copy in mine:
                if any(copy is each for each in self._queue):
                    self._queue = [each for each in self._queue if each is not copy]
                    copy[0].copy_(copy[1])

        return self._order.event(self._stream, finish)
