"""What tests of native rests of steps ask of a report and of an error."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import sidefx_train


def runs_natively(report: sidefx_train.report.StepReport, capture: int = -1) -> bool:
    """Returns True if a capture of the step has a native rest."""
    return any("runs natively" in note for note in report.captures[capture].notes)


def lines_of(step: Callable[[Any], Any], x: Any) -> list[tuple[str, int | None]] | None:
    """Returns the functions and lines from which ``step(x)`` raises a ``ValueError``; ``None`` if it does not."""
    try:
        step(x)
    except ValueError as error:
        return [(frame.name, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)][1:]
    return None
