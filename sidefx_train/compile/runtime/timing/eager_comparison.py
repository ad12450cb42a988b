"""Compares the time of a step's entries with eager, and leaves an entry that is slower for eager.

The first calls that fit an entry alternate between blocks of captured and of eager steps (``paired_blocks.py``). Every
one of them is an ordinary step of the training; none runs twice. A step in parts is timed as a whole, and again where
its parts begin to run eagerly at their limit of captures. Once an entry is decided it is held without anything in
between: a replay costs what it costs without a comparison.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.collectives import communicates
from sidefx_train.compile.pipeline.captured import Captured, CaptureFailed
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.pipeline.run_context import Call
from sidefx_train.compile.residual.generate import MISS
from sidefx_train.compile.runtime.entry_cache import EntryCache
from sidefx_train.compile.runtime.fallback import Fallback
from sidefx_train.compile.runtime.timing.paired_blocks import PairedBlocks
from sidefx_train.compile.runtime.timing.step_time import StepTime
from sidefx_train.config import CompileConfig
from sidefx_train.report import CaptureRecord, TimingRecord

_TIMED = CaptureFailed("SFX210", "timed, to compare the captured step with eager", None, None)

_WHAT_TO_DO = "runs eagerly from now on (keep_slower=True keeps it captured)"

_SEVERAL_PROCESSES = "other processes take part in it, and all should run the same code: they would round differently"

_MAX_EARLY_SAMPLES = 8
"""Eager steps that are timed while a worker compiles; each costs a test of the guards."""

_EAGER_PARTS, _GROWTH = 4, 8
"""Eager runs of parts after which a step is compared again, and the factor of that number for the next time."""

_HELD, _LONGEST_PAUSE = 32, 16
"""Number of calls in a row that fit an entry left for eager, after which it is asked more and more seldom whether one
does, at least in one of so many: the guards may take a noticeable part of a small step."""


class EarlySamples:
    """Times of eager steps that run while their graph is being compiled.

    Args:
        captured: the capture being compiled.
        checks: checks of its guards.
    """

    def __init__(self, captured: Captured, checks: dict[str, Any]) -> None:
        self._captured, self._checks = captured, checks
        self._fetch: Callable[..., Any] | None = None
        self._calls = 0
        self._seconds: list[float] = []

    @property
    def seconds(self) -> list[float]:
        """The times, without that of the first step."""
        return self._seconds[1:]

    def run(self, run: Callable[[], Any], call: Call) -> Any:
        """Calls ``run``, and keeps its time if the call fits the capture and no more than a few were timed."""
        self._calls += 1
        if self._calls > _MAX_EARLY_SAMPLES or not self._fits(call):
            return run()
        time = StepTime()
        result = run()
        self._seconds.append(time.seconds())
        return result

    def _fits(self, call: Call) -> bool:
        if self._fetch is None:
            self._fetch = self._captured.fetcher(self._checks)
        return self._fetch(*call) is not MISS


class EagerComparison:
    """The comparisons of one step.

    Args:
        config: options.
        record_eager: called before a call that fits an entry runs eagerly.
        cache: the entries of the step.
        fallback: runs the step eagerly.
        deterministic: returns True if nothing may depend on timing.
        activity: returns numbers, one of which changes when a call does more than replay.
        entries_of_parts: returns the entries of the step's parts.
    """

    def __init__(
        self,
        config: CompileConfig,
        record_eager: Callable[[], None],
        cache: EntryCache,
        fallback: Fallback,
        deterministic: Callable[[], bool],
        activity: Callable[[], tuple[int, ...]],
        entries_of_parts: Callable[[], list[Entry]],
    ) -> None:
        self._wanted = not config.keep_slower and config.backend not in ("eager", "aot_eager")
        self._record_eager, self._cache, self._fallback = record_eager, cache, fallback
        self.deterministic, self.activity = deterministic, activity
        self._entries_of_parts = entries_of_parts
        self._in_parts: list[tuple[weakref.ref[Entry], CaptureRecord]] = []
        self._eager_parts, self._due = 0, _EAGER_PARTS

    @property
    def applies(self) -> bool:
        """Entries of the step are compared."""
        return self._wanted and not self.deterministic()

    def begin(self, entry: Entry, record: CaptureRecord, early: Iterable[float] = ()) -> None:
        """Prepares an entry that is about to be added.

        Args:
            entry: the entry.
            record: where the result is reported.
            early: seconds of eager steps that ran while it was compiled.
        """
        if not self.applies or entry.once:
            return
        suspension = entry.captured.suspension
        if entry.captured.joint is not None and (suspension is None or suspension.point.native):
            record.timing = _not_compared("its backward runs outside of it")
            return
        if communicates(entry.captured.traced.module.graph):
            record.timing = _not_compared(_SEVERAL_PROCESSES)
            return
        entry.dispatch = _Comparison(self, entry, record, PairedBlocks(list(early)))
        if suspension is not None and not suspension.point.native:
            self._in_parts.append((weakref.ref(entry), record))

    def part_ran_eagerly(self) -> None:
        """Compares the entries in parts again where parts of theirs run eagerly at their limit of captures: the calls
        that were compared had been replays."""
        self._eager_parts += 1
        if self._eager_parts < self._due or not self.applies:
            return
        self._due *= _GROWTH
        for reference, record in self._in_parts:
            entry = reference()
            used = any(entry is each for each in self._cache.entries)
            if entry is not None and used and type(entry.dispatch) is not _LeftForEager:
                entry.dispatch = _Comparison(self, entry, record, PairedBlocks(uneven=True))
                self._cache.hold_again(entry)

    def why_not(self, entry: Entry, result: Any) -> str:
        """Returns why the times of calls say nothing; empty if they do.

        Args:
            entry: the entry.
            result: what a captured call returned.
        """
        entries = (entry, *self._entries_of_parts())
        if any(communicates(each.captured.traced.module.graph) for each in entries):
            return _SEVERAL_PROCESSES
        devices = {device for each in entries for device in _devices(each)} - {"cpu"}
        if devices:
            return f"host time is not the time of a step on {' and '.join(sorted(devices))}"
        return "its backward runs outside of it" if _needs_backward(result) else ""

    def run_eagerly(self, stop: CaptureFailed, call: Call) -> Any:
        """Runs a call eagerly that fits an entry."""
        self._record_eager()
        return self._fallback.run_silently(stop, call)

    def end(self, entry: Entry, record: CaptureRecord, blocks: PairedBlocks, why_not: str = "") -> None:
        """Ends the comparison of an entry: it is kept, or left for eager."""
        entry.dispatch = None
        record.timing = _not_compared(why_not) if why_not else _timing(blocks)
        stop = None
        if blocks.slower and not why_not:
            stop = CaptureFailed("SFX209", str(record.timing), None, None)
            entry.dispatch = _LeftForEager(self, entry, stop)
        self._cache.hold_again(entry)
        if stop is not None:
            self._fallback.warn(stop, (stop.code, ""), _WHAT_TO_DO)


class _Comparison:
    """Dispatches the calls that fit an entry while its times are being compared with eager's."""

    __slots__ = ("_blocks", "_checked", "_entry", "_owner", "_record", "_running")

    def __init__(self, owner: EagerComparison, entry: Entry, record: CaptureRecord, blocks: PairedBlocks) -> None:
        self._owner, self._entry, self._record, self._blocks = owner, entry, record, blocks
        self._checked = self._running = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._running:  # a recursive call, or another thread's
            return self._entry.replay(args, kwargs)
        if self._owner.deterministic():
            self._end("nothing may depend on timing")
            return self._entry.replay(args, kwargs)
        self._running = True
        try:
            return self._eager(args, kwargs) if self._blocks.eager_is_next else self._captured(args, kwargs)
        finally:
            self._running = False

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self._owner.activity()
        time = StepTime()
        result = self._entry.replay(args, kwargs)
        seconds = time.seconds()
        if result is MISS or self._owner.activity() != before:
            return result
        if not self._checked:
            self._checked = True
            why_not = self._owner.why_not(self._entry, result)
            if why_not:
                self._end(why_not)
                return result
        self._add(seconds)
        return result

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        time = StepTime()
        if self._entry.fetch(args, kwargs) is MISS:  # timed as well: an entry left for eager tests its guards
            return MISS
        try:
            result = self._owner.run_eagerly(_TIMED, Call(args, kwargs))
        except BaseException:
            self._end("a step raised")
            raise
        self._add(time.seconds())
        return result

    def _add(self, seconds: float) -> None:
        self._blocks.add(seconds)
        if self._blocks.slower is not None:
            self._end()

    def _end(self, why_not: str = "") -> None:
        if self._entry.dispatch is self:  # not if another comparison has begun
            self._owner.end(self._entry, self._record, self._blocks, why_not)


class _LeftForEager:
    """Runs the calls that fit an entry eagerly."""

    __slots__ = ("_entry", "_held", "_not_asked", "_owner", "_pause", "_stop")

    def __init__(self, owner: EagerComparison, entry: Entry, stop: CaptureFailed) -> None:
        self._owner, self._entry, self._stop = owner, entry, stop
        self._held = self._pause = self._not_asked = 0

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._not_asked:
            self._not_asked -= 1
        elif self._entry.fetch(args, kwargs) is MISS:
            self._held = self._pause = 0
            return MISS
        else:
            self._held += 1
            if self._held > _HELD:
                self._pause = self._not_asked = min(2 * max(self._pause, 1), _LONGEST_PAUSE)
        return self._owner.run_eagerly(self._stop, Call(args, kwargs))


def _timing(blocks: PairedBlocks) -> TimingRecord:
    return TimingRecord(
        "eager" if blocks.slower else "captured",
        *blocks.seconds,
        len(blocks.captured),
        len(blocks.eager),
        statistic="mean" if blocks.uneven else "median",
    )


def _not_compared(why_not: str) -> TimingRecord:
    return TimingRecord("not compared", why_not=why_not)


def _devices(entry: Entry) -> set[str]:
    """Returns the types of the devices of all tensors in an entry's graph."""
    found = set()
    traced = entry.captured.traced
    values = [node.meta.get("val") for node in traced.module.graph.nodes] + [item.example for item in traced.inputs]
    for value in values:
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, torch.Tensor):
                found.add(each.device.type)
    return found


def _needs_backward(value: Any, depth: int = 3) -> bool:
    """Returns True if a step's result has a tensor with an autograd graph, whose backward will be called outside."""
    if isinstance(value, torch.Tensor):
        with compat.subclasses_off():
            return value.requires_grad and not value.is_leaf
    if type(value) not in (tuple, list, dict) or not depth:
        return False
    return any(_needs_backward(each, depth - 1) for each in (value.values() if type(value) is dict else value))
