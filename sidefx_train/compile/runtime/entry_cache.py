"""The entries of a step: in which order calls try them, and when they are forgotten."""

from __future__ import annotations

from collections.abc import Callable

from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.residual.generate import MISS
from sidefx_train.compile.runtime.entry_holder import Holder, hold

_AMORTIZED_AFTER = 100
"""Number of calls after which a capture was worth its time."""


class EntryCache:
    """The entries of one step.

    An entry is forgotten once the program drops an object that it was captured for. Unless its capture is amortized by
    then, it still counts as one: a program that creates such objects at every call must not be captured at every call.

    Args:
        publish: called with the holders whenever they change, in the order in which calls must try them. The list
            itself never changes, since a call may be iterating over it.
        count_calls: returns the number of calls of the step so far.
        on_forgotten: called with the label of a dropped object whose entry was forgotten.

    Attributes:
        holders: the holders, as last published.
        newest_holder: the holder of the latest entry.
        unamortized: labels of the dropped objects whose entries served too few calls.
    """

    def __init__(
        self,
        publish: Callable[[list[Holder]], None],
        count_calls: Callable[[], int],
        on_forgotten: Callable[[str], None],
    ) -> None:
        self._publish, self._count_calls, self._on_forgotten = publish, count_calls, on_forgotten
        self.newest_holder: Holder | None = None
        self.unamortized: list[str] = []
        self._replace_holders([])

    @property
    def entries(self) -> list[Entry]:
        """The entries, in the order in which calls try them."""
        entries = [holder.entry for holder in self.holders]
        return [entry for entry in entries if entry is not None]

    @property
    def newest(self) -> Entry | None:
        """The latest entry, which explains misses even if it is not replayed any more."""
        return None if self.newest_holder is None else self.newest_holder.entry

    @property
    def captures(self) -> int:
        """Number of captures that count: entries, and those forgotten before their capture was amortized."""
        return len(self.holders) + len(self.unamortized)

    def add(self, entry: Entry) -> None:
        """Adds an entry. The newest are tried first, the most general ones last, see :func:`_generality`.

        Of those for different decisions on random numbers, the oldest is tried first: the likely decisions come early,
        and each entry that is tried draws the numbers.
        """
        entry.added_at = self._count_calls()
        newest = self.newest
        if newest is not None:
            decided = [each.captured.specialization.draw_decisions for each in (newest, entry)]
            entry.family = newest.family + (decided[0] >= decided[1])
        self.newest_holder = self._hold(entry)
        held = [(holder, holder.entry) for holder in (*self.holders, self.newest_holder)]
        pairs = [(holder, entry) for holder, entry in held if entry is not None]
        self._replace_holders([holder for holder, _ in sorted(pairs, key=lambda pair: _order(pair[1]))])

    def hold_again(self, entry: Entry) -> None:
        """Makes calls go through the entry's ``dispatch``, or its ``replay``, whichever it has by now."""
        for holder in [holder for holder in self.holders if holder.entry is entry]:
            self._replace_holder(holder)

    def retire(self, entry: Entry) -> None:
        """Stops replaying an entry; it still explains misses."""
        self._replace_holders([holder for holder in self.holders if holder.entry is not entry])

    def drop(self, entry: Entry) -> None:
        """Stops replaying an entry, and does not explain misses by it either."""
        self.retire(entry)
        if self.newest is entry:
            self.newest_holder = None

    def _hold(self, entry: Entry) -> Holder:
        added_at = entry.added_at  # the holder's callback must not refer to the entry

        def forget(holder: Holder, label: str) -> None:
            self._replace_holders([other for other in self.holders if other is not holder])
            if self._count_calls() - added_at < _AMORTIZED_AFTER:
                self.unamortized.append(label)
            self._on_forgotten(label)

        dispatch = entry.dispatch or entry.replay
        return hold(dispatch, entry, entry.shared, entry.guards, MISS, forget, self._replace_holder)

    def _replace_holder(self, holder: Holder) -> None:
        """Holds the entry of a holder by a new one."""
        new = self._hold(holder.entry)
        self._replace_holders([new if other is holder else other for other in self.holders])
        if self.newest_holder is holder:
            self.newest_holder = new

    def _replace_holders(self, holders: list[Holder]) -> None:
        self.holders = holders
        self._publish(holders)


def _order(entry: Entry) -> tuple[bool, bool, int]:
    """Returns a key by which entries are tried in order; equal ones from old to new."""
    return *_generality(entry), -entry.family


def _generality(entry: Entry) -> tuple[bool, bool]:
    """Returns a key by which more general entries come later: those in parts around random decisions are for decisions
    without an entry of their own, those with symbolic sizes for such sizes."""
    captured = entry.captured
    return not captured.specialization.host_draws, captured.symbolic_sizes
