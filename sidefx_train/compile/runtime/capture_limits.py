"""Decides whether a step may be captured once more, and remembers the captures that failed."""

from __future__ import annotations

from sidefx_train.compile.pipeline.captured import CaptureFailed, StopGuard
from sidefx_train.compile.pipeline.run_context import Call
from sidefx_train.compile.runtime.entry_cache import EntryCache
from sidefx_train.compile.runtime.entry_holder import Holder, hold
from sidefx_train.compile.runtime.guard_failures import Missed
from sidefx_train.config import CompileConfig
from sidefx_train.errors import RecaptureLimitError

_STOPS_PER_CAPTURE = 4
"""Failed captures allowed for each entry that ``recapture_limit`` allows."""

_EXPLAINED = 32
"""Number of calls beyond the limit for which the guard that fails is looked up: that takes longer than a small step."""

_LONGEST_PAUSE = 64
"""Largest number of calls beyond the limit that do not try the entries, after calls that fit none of them."""

_EQUAL_STOPS = 4
"""Number of captures that stopped at one line until the next ones are tried more and more seldom: another value of what
they read has not helped."""

_MOST_LEFT_OUT = 4096
"""Largest number of calls between two of those: a capture may take as long as hundreds of eager steps."""

_HELD = 32
"""Number of calls in a row that would repeat a failed capture, after which it is asked more and more seldom whether one
would: the guards may take a noticeable part of a small step."""

_MAX_BACKEND_FAILURES = 2
"""Number of backend failures after which the step runs eagerly for good: each takes as long as a success."""


class CaptureLimits:
    """The limits of one step.

    Args:
        config: options.
        cache: the entries of the step.

    Attributes:
        stops: captures that failed, the latest last.
        backend_failures: number of captures since the last success that the backend could not compile.
    """

    def __init__(self, config: CompileConfig, cache: EntryCache) -> None:
        self._config, self._cache = config, cache
        self._reasons: dict[str, str] = {}
        self.stops: list[CaptureFailed] = []
        self.backend_failures = 0
        self._latest_backend_stop: CaptureFailed | None = None
        self._latest_held: CaptureFailed | None = None
        self._explained: list[tuple[CaptureFailed, str]] = []
        self._replays = self._misses = self._pause = self._paused = 0
        self._equal_stops = self._left_out = 0
        self._held = self._held_pause = self._not_asked = 0

    @property
    def backend_stop(self) -> CaptureFailed | None:
        """The latest backend failure if there were too many; then the step is not captured any more."""
        return self._latest_backend_stop if self.backend_failures >= _MAX_BACKEND_FAILURES else None

    def add_backend_failure(self, stop: CaptureFailed) -> None:
        """Counts a graph that the backend could not compile."""
        self.backend_failures += 1
        self._latest_backend_stop = stop

    def add_stop(self, stop: CaptureFailed) -> None:
        """Remembers a capture that failed: calls to which its guards apply run eagerly."""
        if stop.holds is not None:
            stop.holds = hold(stop.holds.holds, stop.holds, (), stop.holds.guards, False, _ignore_drop)
            latest = self.stops[-1] if self.stops else None
            same = latest is not None and (latest.code, latest.location) == (stop.code, stop.location)
            self._equal_stops = self._equal_stops + 1 if same else 1
            self._left_out = min(2 ** max(self._equal_stops - _EQUAL_STOPS, 0), _MOST_LEFT_OUT) - 1
        self.stops.append(stop)

    def end_equal_stops(self) -> None:
        """Ends a sequence of captures that stopped at one line: the latest one did not."""
        self._equal_stops = self._left_out = 0

    @property
    def latest_stop_guard(self) -> StopGuard | None:
        """The guard of the latest failed capture, unless what it was captured for is gone."""
        holder = self.stops[-1].holds if self.stops else None
        return None if holder is None else holder.entry

    def stop_for(self, call: Call) -> CaptureFailed | None:
        """Returns the failed capture that this call would repeat, or probably would."""
        if self._not_asked:
            self._not_asked -= 1
            return self._latest_held
        known = next((stop for stop in self.stops if stop.holds is not None and stop.holds(*call)), None)
        self._note_held(known)
        if known is None and self._left_out and self.stops[-1].holds is not None:
            self._left_out -= 1
            return self.stops[-1]
        return known

    def _note_held(self, known: CaptureFailed | None) -> None:
        """Counts calls in a row that would repeat a failed capture."""
        if known is None:
            self._held = self._held_pause = 0
            return
        self._latest_held, self._held = known, self._held + 1
        if self._held > _HELD:
            self._held_pause = self._not_asked = min(2 * max(self._held_pause, 1), _LONGEST_PAUSE)

    def known_limit(self) -> tuple[CaptureFailed, str] | None:
        """Returns why the step must not be captured again, and the label of the value that kept changing, from earlier
        calls; ``None`` if it may be, or if this call's guard failure is to be looked up."""
        return self._explained[-1] if len(self._explained) >= _EXPLAINED and self._is_reached() else None

    def begins_pause(self, replays: int) -> bool:
        """Returns True if the next calls are not to try the entries, after one beyond the limit that fits none of them.

        The guards of all entries may take longer than a small step. So calls of which none is replayed try them more
        and more seldom.

        Args:
            replays: number of calls replayed so far.
        """
        if replays != self._replays:
            self._replays, self._misses, self._pause = replays, 0, 0
        self._misses += 1
        if self._misses <= _EXPLAINED:
            return False
        self._pause = self._paused = min(2 * max(self._pause, 1), _LONGEST_PAUSE)
        return True

    def ends_pause(self) -> bool:
        """Counts a call that has not tried the entries; returns True if the next one is to try them."""
        self._paused -= 1
        return self._paused <= 0

    def _is_reached(self) -> bool:
        limit = self._config.recapture_limit
        return self._cache.captures >= limit or len(self.stops) >= _STOPS_PER_CAPTURE * limit

    def reached(self, missed: Missed | None) -> CaptureFailed | None:
        """Returns why the step must not be captured again; ``None`` if it may be.

        Args:
            missed: why the newest entry missed.

        Raises:
            RecaptureLimitError: a limit is reached, and ``config.on_failure`` asks for an error.
        """
        captures = self._cache.captures
        if not self._is_reached():
            self._explained.clear()
            return None
        if missed is not None:
            what = f"{missed.label} (was {missed.old}, is {missed.new})"
        elif self._cache.unamortized:
            what = f"{self._cache.unamortized[-1]}, which the program drops after a few calls"
        else:
            what = "the reason the step cannot be captured"
        label = missed.label if missed else ""
        reason = self._reasons.setdefault(label, f"{captures} captures, and still changing: {what}")
        location = missed.location if missed else None
        if self._config.on_failure == "raise":
            raise RecaptureLimitError("SFX203", reason, location)
        stop = CaptureFailed("SFX203", reason, location, None)
        self._explained.append((stop, label))
        return stop


def _ignore_drop(holder: Holder, label: str) -> None:
    """Does nothing: a stop guard that can no longer hold is only dropped."""
