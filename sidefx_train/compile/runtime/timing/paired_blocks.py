"""Decides from times of steps whether a captured step is slower than eager: paired blocks, and a fixed schedule.

A block is a few steps of one kind: its first step, which finds the processor's caches full of the other kind's data,
does not count, and the median of the others is its time. A captured block and the eager block after it are a pair, so
that a change of the machine's load concerns both. The ratio of a pair is captured time by eager time.

The times of a step of which parts run eagerly in some calls are uneven: a median says nothing about them. There the
means of all steps that count are compared, without the longest of each kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

WARM_UP = 4
"""Captured steps, after the entry's first, that do not count."""

UNCOUNTED, COUNTED = 1, 3
BLOCK = UNCOUNTED + COUNTED
"""Steps of a block, of which the first does not count."""

MAX_PAIRS = 5

_MARGIN, _DEVIATIONS = 0.05, 2
"""Slower, after the last pair: every ratio exceeds 1 by more than this margin, or the median ratio does, and by more
than so many median deviations from it."""

_FASTER, _FASTER_PAIRS = 0.9, 2
_SLOWER, _SLOWER_PAIRS = 1.25, 3
"""Ratios, and numbers of pairs, that decide before the last pair if all pairs agree."""

_FASTER_BEFORE, _MIN_BEFORE = 0.5, 3
"""Ratio that decides without a pair, and the eager steps that it needs. Those ran while a worker was compiling, which
may slow them down by as much as two processes that share a core."""


_UNEVEN_PAIRS = 8
"""Pairs after which uneven times decide."""


class PairedBlocks:
    """The times of one entry.

    Args:
        eager_before: seconds of eager steps that ran while the entry was being compiled.
        uneven: the captured steps take different times.

    Attributes:
        captured: seconds of the captured steps that count.
        eager: seconds of the eager steps that count.
        slower: True once the captured step is found to be slower, False once it is not.
        uneven: as given.
    """

    def __init__(self, eager_before: Sequence[float] = (), uneven: bool = False) -> None:
        self._before = list(eager_before)
        self.uneven = uneven
        self._steps = 0
        self._ratios: list[float] = []
        self.captured: list[float] = []
        self.eager: list[float] = []
        self.slower: bool | None = None

    @property
    def eager_is_next(self) -> bool:
        """The next step is to run eagerly."""
        done = self._steps - WARM_UP
        return done >= 0 and done % (2 * BLOCK) >= BLOCK

    def add(self, seconds: float) -> None:
        """Adds the time of a step of the kind that was next."""
        eager, done = self.eager_is_next, self._steps - WARM_UP
        self._steps += 1
        if done < 0:
            return
        if done % BLOCK >= UNCOUNTED:
            (self.eager if eager else self.captured).append(seconds)
        if done == BLOCK - 1:
            self._compare_with_earlier()
        if done % (2 * BLOCK) == 2 * BLOCK - 1:
            self._ratios.append(median(self.captured[-COUNTED:]) / max(median(self.eager[-COUNTED:]), 1e-9))
            self.slower = self._slower_on_average() if self.uneven else _slower(self._ratios)

    @property
    def seconds(self) -> tuple[float, float]:
        """The time of a captured and of an eager step: medians, or means of uneven times."""
        typical = _mean if self.uneven else median
        return typical(self.captured), typical(self.eager)

    def _slower_on_average(self) -> bool | None:
        """Returns whether captured steps take more time in all; ``None`` if another pair is needed."""
        captured, eager = self.seconds
        return None if len(self._ratios) < _UNEVEN_PAIRS else captured > (1 + _MARGIN) * eager

    def _compare_with_earlier(self) -> None:
        """Decides for the captured step where it is much faster than the fastest of the earlier eager steps."""
        if len(self._before) >= _MIN_BEFORE and median(self.captured) <= _FASTER_BEFORE * min(self._before):
            self.eager = self._before
            self.slower = False


def _mean(seconds: list[float]) -> float:
    """Returns the mean without the longest time, in which something else may have run."""
    return fmean(sorted(seconds)[:-1])


def _slower(ratios: list[float]) -> bool | None:
    """Returns whether captured steps are slower; ``None`` if another pair is needed."""
    if len(ratios) >= _FASTER_PAIRS and max(ratios) <= _FASTER:
        return False
    if len(ratios) >= _SLOWER_PAIRS and min(ratios) >= _SLOWER:
        return True
    if len(ratios) < MAX_PAIRS:
        return None
    if min(ratios) > 1 + _MARGIN:
        return True
    middle = median(ratios)
    deviation = median(abs(ratio - middle) for ratio in ratios)
    return middle - 1 > max(_MARGIN, _DEVIATIONS * deviation)
