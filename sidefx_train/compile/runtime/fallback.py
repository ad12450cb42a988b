"""Runs a step eagerly where no captured graph can: the report says why, and one warning for each reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from sidefx_train.compile.capture.shadows.deferred_values import message_of
from sidefx_train.compile.pipeline.captured import CaptureFailed
from sidefx_train.compile.pipeline.run_context import Call
from sidefx_train.compile.runtime.describe import callers_level, summary
from sidefx_train.config import CompileConfig
from sidefx_train.errors import FIRST_STEP, LAZY, GraphBreakError, SideFXWarning
from sidefx_train.report import StepReport

_NO_BREAKS = frozenset({"SFX202", "SFX203", "SFX208", "SFX209", "SFX210"})
"""Codes of reasons that are no graph breaks: a captured graph exists, or could."""

_EXPECTED = frozenset({FIRST_STEP, LAZY, "SFX212"})
"""Codes of reasons that pass by themselves after a few calls."""

_PATIENCE = 16
"""Steps run eagerly for such a reason until a warning says that it does not pass."""


class Fallback:
    """The eager runs of one step.

    Args:
        fn: the step.
        name: its name in warnings.
        config: options.
        report: report of the step.
        warned: keys of the warnings issued so far; the parts of a step share them.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        config: CompileConfig,
        report: StepReport,
        warned: set[tuple[str, str]],
    ) -> None:
        self._fn, self._name, self._report = fn, name, report
        self._strict = config.strict
        self.warned = warned

    def run(self, stop: CaptureFailed, call: Call, key: tuple[str, str] | None = None) -> Any:
        """Runs the step eagerly.

        Args:
            stop: why it is not replayed.
            call: the call.
            key: the warning is issued once per key; by default once per code and line.

        Raises:
            GraphBreakError: the options ask for an error instead.
        """
        if stop.raised:
            return self._run_after_error(stop, call)
        if stop.code in _EXPECTED:
            result = self.run_silently(stop, call)
            if sum(record.count for record in self._report.fallbacks if record.code == stop.code) >= _PATIENCE:
                self.warn(stop, (stop.code, ""))
            return result
        if stop.code not in _NO_BREAKS:
            self._report.record_break(stop.code, stop.reason, stop.location)
            if self._strict:
                raise GraphBreakError(stop.code, stop.reason, stop.location) from stop.__cause__
        self._report.record_fallback(stop.code, stop.why_eager, stop.location)
        result = self._fn(*call.args, **call.kwargs)  # first: an error of the step itself takes precedence
        self.warn(stop, key or (stop.code, str(stop.location)))
        return result

    def run_silently(self, stop: CaptureFailed, call: Call) -> Any:
        """Runs the step eagerly, without a warning, for a reason that is no break or has been reported as one."""
        self._report.record_fallback(stop.code, stop.reason, stop.location)
        return self._fn(*call.args, **call.kwargs)

    def warn(self, stop: CaptureFailed, key: tuple[str, str], what: str = "ran eagerly") -> None:
        """Warns that the step ``what`` because of ``stop``, once per key."""
        if key in self.warned:
            return
        self.warned.add(key)
        where = f"{stop.location}: " if stop.location else ""
        text = f"{self._name} {what}: [{stop.code}] {where}{stop.why_eager}"
        warnings.warn(text, SideFXWarning, stacklevel=callers_level())

    def _run_after_error(self, stop: CaptureFailed, call: Call) -> Any:
        """Handles an exception from the capture: usually the step's own, which an eager run raises again."""
        try:
            result = self._fn(*call.args, **call.kwargs)
        except Exception as error:
            cause = stop.__cause__
            if type(error) is type(cause) and message_of(cause) in (str(error), ""):
                stop.holds = None  # another call may have nothing wrong
                self._report.record_fallback("SFX202", f"the step raised {summary(error)}", stop.location)
            else:
                self._report.record_break(stop.code, stop.reason, stop.location)
                self._report.record_fallback(stop.code, stop.reason, stop.location)
            raise
        self._report.record_break(stop.code, stop.reason, stop.location)
        if self._strict:
            raise GraphBreakError(stop.code, stop.reason, stop.location) from stop.__cause__
        self._report.record_fallback(stop.code, stop.reason, stop.location)
        self.warn(stop, (stop.code, str(stop.location)))
        return result
