"""Runs the device section of a step: plainly at first, then by replaying a recording of it.

The first call of a section, and of every new combination of sizes and numbers, runs plainly: kernels are loaded and
workspaces allocated by it, and it is a real step. The second records and replays. So no step runs twice, and nothing is
copied for a warm-up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from sidefx_train.compile.gpu.prefetch import NOT_REPLAYED, Prefetcher
from sidefx_train.compile.gpu.recording import Device, Recording, can_be_handed_out
from sidefx_train.compile.gpu.section import Section
from sidefx_train.compile.native import increment_versions
from sidefx_train.report import CudaGraphRecord

_comparing: ContextVar[bool] = ContextVar("comparing", default=False)


@contextmanager
def nothing_recorded() -> Iterator[None]:
    """Context of calls with copies of the inputs, whose addresses no later call has."""
    token = _comparing.set(True)
    try:
        yield
    finally:
        _comparing.reset(token)


_MOST_SEEN = 1024
"""Limit of remembered combinations of sizes and numbers without a recording."""

_MOST_DROPPED = 8
"""Recordings that may be dropped because addresses moved, until a section runs plainly for good."""


class StaticReplay:
    """A device section, callable like the generated function, with a list of its arguments.

    Args:
        run: runs the section plainly.
        section: its arguments and results.
        device: what records.
        limit: number of recordings that are kept.
        memory: bytes of results of recordings that are kept.
        record: counts calls.
        drawn_from: generators whose state is restored if a plain run fails.

    Attributes:
        record: counts calls.
        prefetcher: has copies of inputs on the device; ``None`` if the program never prefetched a batch.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], Sequence[Any]],
        section: Section,
        device: Device,
        limit: int,
        memory: int,
        record: CudaGraphRecord,
        drawn_from: Sequence[torch.Generator] = (),
    ) -> None:
        self._run, self._section, self._device = run, section, device
        self._limit, self._memory, self.record = limit, memory, record
        self._drawn_from = drawn_from
        self.prefetcher: Prefetcher | None = None
        self._recordings: OrderedDict[Any, Recording] = OrderedDict()
        self._seen: set[Any] = set()
        self._misfit: Any = None
        self._dropped = self._evicted = 0
        self._gradients: dict[int, int] = {}
        self._writes: tuple[int, ...] = ()
        self._pool: Any = None
        self._last: Recording | None = None
        """The recording that was replayed last: the program has its gradients."""
        self._numbers = [i for i, role in enumerate(section.roles) if role == "number"]
        self._inputs = [i for i, role in enumerate(section.roles) if role == "input"]

    @property
    def can_replay(self) -> bool:
        """Returns True if there is a recording."""
        return bool(self._recordings)

    def hand_out(self, gradients: dict[int, int]) -> None:
        """Lets every replay write results again that the program gets only as the gradient of an argument.

        Args:
            gradients: position of the argument, by position of the result.
        """
        self._gradients = gradients if can_be_handed_out() else {}
        if self._gradients:  # other sections must not write what the program has
            self._pool = self._device.new_pool()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self.record.refused:
            return self._plainly(args, self.record.refused)
        key = self._key(args)
        recording = self._recordings.get(key)
        if recording is None:
            if key not in self._seen:
                if len(self._seen) >= _MOST_SEEN:
                    self._seen.clear()
                self._seen.add(key)
                return self._first(args)
            return self._record(key, args)
        if not recording.fits(args):
            if _comparing.get():
                return self._plainly(args, "compared with the captured graph")
            return self._elsewhere(key, args)
        self._misfit = None
        other = self._last if self._last is not recording else None
        if not recording.may_write(args) or (other is not None and not other.may_write(args)):
            return self._in_use(args)
        if len(self._recordings) > 1:
            self._recordings.move_to_end(key)
        return self._replayed(recording, args)

    def _replayed(self, recording: Recording, args: list[Any]) -> Sequence[Any]:
        self.record.replays += 1
        self._last = recording
        results = recording.replay(args, self.prefetcher)
        if self._writes:
            increment_versions(args, self._writes)
        return results

    def _key(self, args: list[Any]) -> Any:
        numbers = [args[i] for i in self._numbers]
        zeros = [str(number) for number in numbers if number == 0]  # 0.0 and -0.0 are equal, but not the same
        return (*numbers, *zeros, *[args[i].shape for i in self._inputs])

    def _first(self, args: list[Any]) -> Sequence[Any]:
        """Runs a call plainly, and notes how it counts writes: what is replayed has no Python that counts."""
        fixed = [(i, args[i]) for i, role in enumerate(self._section.roles) if role in ("static", "written")]
        before = [tensor._version for _, tensor in fixed]
        results = self._plainly(args, "first call with its sizes and numbers")
        self._writes = tuple(i for (i, t), was in zip(fixed, before, strict=True) for _ in range(t._version - was))
        return results

    def _elsewhere(self, key: Any, args: list[Any]) -> Sequence[Any]:
        """Runs a call whose tensors are not where they were; a second in a row drops the recording."""
        if self._misfit == key:
            self._misfit = None
            self._drop(key)
            self._dropped += 1
            if self._dropped > _MOST_DROPPED:
                self.record.refused = "the address of a parameter, buffer or state changes again and again"
        else:
            self._misfit = key
        return self._plainly(args, "the address of a parameter, buffer or state has changed")

    def _in_use(self, args: list[Any]) -> Sequence[Any]:
        """Runs a call while the program uses a gradient of an earlier one; from then on it gets copies."""
        while self._recordings:
            self._drop(next(iter(self._recordings)))
        self._gradients, self._last = {}, None
        return self._plainly(args, "a gradient of an earlier step is in use: gradients are copied from now on")

    def _plainly(self, args: list[Any], reason: str) -> Sequence[Any]:
        self.record.ran_plainly(reason)
        if self.prefetcher is not None and not _comparing.get():
            self.prefetcher.drop(NOT_REPLAYED)
        states = [generator.get_state() for generator in self._drawn_from]
        try:
            return self._run(args)
        except BaseException:  # the step may run again, eagerly
            for generator, state in zip(self._drawn_from, states, strict=True):
                generator.set_state(state)
            raise

    def _record(self, key: Any, args: list[Any]) -> Sequence[Any]:
        if self._evicted > 2 * self._limit:  # recording takes longer than a plain run
            return self._plainly(args, "more combinations of sizes and numbers than recordings are kept")
        if _comparing.get():
            return self._plainly(args, "compared with the captured graph")
        if self._device.is_recording():
            return self._plainly(args, "the program records the step itself")
        reserved = self._device.reserved()
        try:
            recording = Recording(self._run, self._section, args, self._device, self._gradients, self._pool)
        except Exception as error:  # the report says so
            self.record.refused = f"cannot be recorded: {first_line(error)}"
            return self._plainly(args, self.record.refused)
        self._recordings[key] = recording
        self.record.recordings += 1
        self.record.reserved += max(0, self._device.reserved() - reserved)
        self.record.memory += recording.memory
        while len(self._recordings) > 1 and (len(self._recordings) > self._limit or self.record.memory > self._memory):
            self._drop(next(iter(self._recordings)))
            self._evicted += 1
        return self._replayed(recording, args)

    def _drop(self, key: Any) -> None:
        self.record.memory -= self._recordings.pop(key).memory


def first_line(error: BaseException) -> str:
    """Returns an error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
