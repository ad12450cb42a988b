"""The time of a step, without the time in which other processes had the processor."""

from __future__ import annotations

import sys
import time

if sys.platform == "linux":
    import resource


class StepTime:
    """Times a step that begins now.

    A thread that gave up the processor itself has slept, or waited for a device or another thread: what has passed
    counts. Otherwise it had the processor, or another process took it away: only its own time counts. On a loaded
    machine the first varies several times as much, and a slower step goes unnoticed.
    """

    __slots__ = ("_began", "_ran", "_waits")

    def __init__(self) -> None:
        self._waits = waits()
        self._ran = time.thread_time()
        self._began = clock()

    def seconds(self) -> float:
        """Returns the seconds since the beginning."""
        passed, ran = clock() - self._began, time.thread_time() - self._ran
        return passed if self._waits is None or waits() != self._waits else min(passed, ran)


def clock() -> float:
    """Returns the seconds that have passed since some moment."""
    return time.perf_counter()


def waits() -> int | None:
    """Returns how often this thread gave up the processor itself; ``None`` where the system does not tell."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if sys.platform == "linux" else None
