"""Which way the branches between the parts of a step go: one that goes the same way for a while can be assumed."""

from __future__ import annotations

import types

Branch = tuple[types.CodeType, int]
"""A jump of the program on a condition, by its code and index."""

_CALLS = 10
"""Number of calls after which a branch that went one way is settled; fewer than a comparison with eager takes."""

_GROWTH = 8
"""Factor of that number after a branch that was settled went the other way too often."""


class BranchHistory:
    """The branches of one step that lie between its parts, and run natively.

    Attributes:
        calls: number of calls after which a branch is settled.
    """

    def __init__(self) -> None:
        self.calls = _CALLS
        self._now: dict[Branch, bool | None] = {}
        self._lasting: dict[Branch, tuple[bool | None, int]] = {}

    def note(self, branch: Branch, truth: bool) -> None:
        """Records the condition of a branch in the call that is running."""
        if self._now.setdefault(branch, truth) is not truth:
            self._now[branch] = None

    def end_call(self) -> bool:
        """Ends a call of the step; returns True if a branch of the step, or of a part, may have become settled."""
        settled = False
        for branch, truth in self._now.items():
            known, calls = self._lasting.get(branch, (truth, 0))
            calls = calls + 1 if truth is not None and truth is known else 0
            self._lasting[branch] = truth, calls
            settled = settled or calls in (self.calls, 2 * self.calls)
        self._now.clear()
        return settled

    def truths(self, calls: int) -> frozenset[tuple[Branch, bool]]:
        """Returns the branches that went one way in the last calls, at least so many, with their condition."""
        lasting = self._lasting.items()
        return frozenset((branch, truth) for branch, (truth, count) in lasting if count >= calls and truth is not None)

    def begin_again(self) -> None:
        """Forgets all branches; from now on it takes longer until one is settled."""
        self._now.clear()
        self._lasting.clear()
        self.calls *= _GROWTH
