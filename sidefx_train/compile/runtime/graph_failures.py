"""Handles what captured graphs report when they run: errors, failed assumptions, and differences from eager; decides
which branches are assumed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train.compile.capture.resume.branch_history import BranchHistory
from sidefx_train.compile.common import signal_handlers
from sidefx_train.compile.common.type_checks import set_field
from sidefx_train.compile.pipeline.captured import CaptureFailed
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.pipeline.run_context import Call
from sidefx_train.compile.runtime.describe import summary
from sidefx_train.compile.runtime.entry_cache import EntryCache
from sidefx_train.compile.runtime.fallback import Fallback
from sidefx_train.compile.runtime.guard_failures import Missed, SpecializationState
from sidefx_train.config import CompileConfig
from sidefx_train.errors import AssumptionFailed, Location, UnfinishedError, VerificationError
from sidefx_train.report import StepReport

_MIN_FAILED_ASSUMPTIONS, _CALLS_PER_FAILURE = 3, 50
"""Assumptions are given up after this many failures, if there was one in at most this many calls."""

_CALLS_PER_COMPUTING_REST = 20
"""A native rest that computes with tensors at least once in this many calls is captured."""

_UNUSUAL, _CALLS_PER_UNUSUAL = 3, 20
"""Usual branches are assumed no more after so many failures, one in so many calls: each is an eager step."""


class UsualBranches:
    """The branches of one step, or of one part, that are assumed to go as they have gone, in place of a graph break.

    Args:
        cache: its entries.
        specialization: its specialization state.
        history: which way the branches of the whole step went.
        deterministic: returns True if nothing may depend on earlier calls.
        is_part: the step is the rest of another. What its branches lead to may be captured with the whole step, so that
            it waits for that.
    """

    def __init__(
        self,
        cache: EntryCache,
        specialization: SpecializationState,
        history: BranchHistory,
        deterministic: Callable[[], bool],
        is_part: bool,
    ) -> None:
        self._cache, self._specialization, self._history = cache, specialization, history
        self._deterministic, self._is_part = deterministic, is_part
        self._trigger: Missed | None = None
        self._failures: deque[int] = deque(maxlen=_UNUSUAL)

    def settle(self) -> None:
        """Forgets entries that end at a branch which is settled: the next capture goes beyond it.

        So it may beyond a condition inside a call (the checks of ``torch.distributions``), which is not assumed only
        because a branch behind it parts a forward from its backward.
        """
        if self._deterministic() or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        calls = self._history.calls * (2 if self._is_part else 1)
        current = self._specialization.current
        settled = {each: truth for each, truth in self._history.truths(calls) if each not in current.endless_branches}
        assumed = dict(current.usual_truths)
        found: Location | None = None
        for entry in self._cache.entries:
            suspension = entry.captured.suspension
            branch = None if suspension is None or suspension.point.native else suspension.bridges[-1].branch
            if suspension is None or suspension.point.native:
                continue
            inside = branch is None and suspension.point.code == "SFX101" and not self._is_part
            if (branch in settled and branch not in assumed) or (inside and not settled.keys() <= assumed.keys()):
                found = suspension.point.location
                self._cache.drop(entry)
        if found is not None:
            self._specialization.assume_usual(self._history.truths(calls // 2))
            self._trigger = Missed("the way of a branch", "unknown", f"the same in {calls} calls", found)

    def take_trigger(self) -> Missed | None:
        """Returns why the next capture is necessary, once, if it goes beyond a settled branch."""
        trigger, self._trigger = self._trigger, None
        return trigger

    @property
    def assumed(self) -> bool:
        """True if branches are assumed to go as they have gone."""
        return bool(self._specialization.current.usual_truths)

    def failed(self, calls: int) -> bool:
        """Counts a failed assumption; returns True if there were several in a few calls: nothing is usual any more.

        Args:
            calls: number of calls of the step so far.
        """
        self._failures.append(calls)
        if len(self._failures) < _UNUSUAL or calls - self._failures[0] >= _UNUSUAL * _CALLS_PER_UNUSUAL:
            return False
        self._failures.clear()
        self._specialization.assume_usual(frozenset())
        self._history.begin_again()
        return True


class GraphFailures:
    """The failures of one step's graphs.

    Args:
        config: options.
        report: report of the step.
        cache: the entries of the step.
        specialization: specialization state of the step.
        usual: branches that are assumed to go as they have gone.
        fallback: runs the step eagerly.
        count_calls: returns the number of calls of the step so far.
        uncount_replay: called when a replay becomes an eager call.
    """

    def __init__(
        self,
        config: CompileConfig,
        report: StepReport,
        cache: EntryCache,
        specialization: SpecializationState,
        usual: UsualBranches,
        fallback: Fallback,
        count_calls: Callable[[], int],
        uncount_replay: Callable[[], None],
    ) -> None:
        self._config, self._report = config, report
        self._cache, self._specialization, self._usual, self._fallback = cache, specialization, usual, fallback
        self._count_calls, self._uncount_replay = count_calls, uncount_replay
        self._failed_assumptions = 0
        self._last_computing_rest = 0

    def failed(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the step eagerly after a graph raised without changing anything: errors are eager's.

        Raises:
            VerificationError, UnfinishedError: the error itself, since the step cannot run again.
            Exception: the error itself, if a signal handler of the program raised it.
        """
        origin = error.__cause__ if isinstance(error, UnfinishedError) and error.__cause__ else error
        if signal_handlers.raised(origin):
            raise origin
        if isinstance(error, (VerificationError, UnfinishedError)):
            raise error
        if not self._config.strict:
            set_field(error, "__traceback__", None)  # its frames refer to objects that the eager step may drop
        assuming = [entry for entry in self._cache.entries if entry.captured.assumptions]
        for entry in [entry for entry in self._cache.entries if entry.fresh]:
            entry.fresh = False
            for _, undo in entry.captured.commits:
                undo()
            if entry.captured.commits:  # it refers to optimizer state that no longer exists
                self._cache.drop(entry)
        if isinstance(error, AssumptionFailed):
            stop = self._assumption_failed(error, assuming)
        else:
            stop = CaptureFailed("SFX202", summary(error), None, None)
        stop.__cause__ = error
        self._uncount_replay()
        return self._fallback.run(stop, Call(args, kwargs))

    def differs(self, what: str) -> None:
        """Reports a difference found by ``verify``: the captured graph runs operation by operation from now on.

        Raises:
            VerificationError: ``config.on_failure`` asks for an error.
        """
        if self._config.on_failure == "raise":
            raise VerificationError("SFX205", what)
        self._report.record_break("SFX205", what)
        stop = CaptureFailed("SFX205", what, None, None)
        self._fallback.warn(stop, ("SFX205", what), "runs operation by operation")

    def rest_computes(self) -> None:
        """Notes that the rest of a step, which runs natively, has computed with tensors; if that is not rare, it is
        captured from now on, unless a graph break in it would be an error."""
        calls = self._count_calls()
        since, self._last_computing_rest = calls - self._last_computing_rest, calls
        if since >= _CALLS_PER_COMPUTING_REST or self._config.strict:
            return
        self._specialization.capture_rest()
        for entry in self._cache.entries:
            suspension = entry.captured.suspension
            if suspension is not None and suspension.point.native:
                self._cache.drop(entry)

    def _gives_up(self) -> bool:
        """Counts a failed assumption; returns True if usual branches, or else all conditions, are assumed no more."""
        calls = self._count_calls()
        if self._usual.assumed:
            return self._usual.failed(calls)
        self._failed_assumptions += 1
        failures = self._failed_assumptions
        too_often = failures >= _MIN_FAILED_ASSUMPTIONS and failures * _CALLS_PER_FAILURE >= calls
        if too_often:
            self._specialization.assume_nothing()
        return too_often

    def _assumption_failed(self, error: AssumptionFailed, assuming: list[Entry]) -> CaptureFailed:
        """Counts a failed assumption; if that is not rare, the entries that assume conditions are dropped."""
        lines = dict.fromkeys(line for entry in assuming for line in entry.captured.assumptions)
        if self._gives_up():
            for entry in assuming:
                self._cache.drop(entry)
        if len(lines) == 1:
            return CaptureFailed("SFX208", str(error), next(iter(lines)), None)
        if not lines:
            reason = "an operation does not accept a size that the graph computes, or an integer has more than 64 bits"
            return CaptureFailed("SFX208", reason, None, None)
        return CaptureFailed("SFX208", f"{error} ({' or '.join(map(str, lines))})", None, None)
