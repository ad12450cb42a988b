"""Captures that stop before a given instruction and continue after it in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from sidefx_train.compile.capture.interpreter.interpreter import Interpreter
from sidefx_train.compile.capture.resume.resume_function import is_continuation
from sidefx_train.compile.capture.resume.suspension import StopPoint, stop_points
from sidefx_train.compile.pipeline.capture_run import CaptureRun
from sidefx_train.compile.pipeline.captured import CaptureFailed
from sidefx_train.errors import Unsupported

_REASON = "stopped here by a test"


class Cuts:
    """Counts the outcomes of the captures.

    Attributes:
        made: captures that ended at the instruction and continued after it.
        refused: captures that could not be divided there.
        over: the step has fewer instructions.
    """

    def __init__(self) -> None:
        self.made = self.refused = 0
        self.over = False


@contextlib.contextmanager
def stopped_at(count: int) -> Iterator[Cuts]:
    """Makes every capture of a step meet an unsupported operation before its ``count``-th instruction."""
    cuts = Cuts()
    run, suspend = CaptureRun.run, Interpreter.suspend
    stopping = False

    def once(self: CaptureRun) -> Any:
        nonlocal stopping
        if self.point is not None or is_continuation(self.fn):
            try:
                made = run(self)
            except CaptureFailed:
                cuts.refused += self.point is not None
                raise
            cuts.made += self.point is not None
            return made
        stopping = True
        point = StopPoint(count, 0, "SFX103", _REASON, None)
        try:
            made = run(CaptureRun(self.fn, self.args, self.kwargs, self.name, self.spec, point, self.in_order))
        except CaptureFailed as stop:
            if stop.reason == _REASON:
                stop.points = stop_points(stop.__cause__, stop.code, stop.reason, stop.location)
            else:
                cuts.over = True
            raise
        finally:
            stopping = False
        return made

    def interrupted(interpreter: Interpreter) -> Any:
        if stopping:
            raise Unsupported("SFX103", _REASON, interpreter.world.locate())
        return suspend(interpreter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CaptureRun, "run", once)
        patch.setattr(Interpreter, "suspend", interrupted)
        yield cuts
