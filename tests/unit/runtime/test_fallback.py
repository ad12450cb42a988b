"""Eager runs: what the report and the warnings say."""

from __future__ import annotations

import warnings

import pytest

from sidefx_train.compile.pipeline.captured import CaptureFailed
from sidefx_train.compile.pipeline.run_context import Call
from sidefx_train.compile.runtime.fallback import Fallback
from sidefx_train.config import CompileConfig
from sidefx_train.errors import GraphBreakError, Location
from sidefx_train.report import StepReport

CALL = Call((2,), {"y": 3})


def fallback(fn=lambda x, y: x * y, warned=None, **options):
    return Fallback(fn, "step", CompileConfig(**options), StepReport(), set() if warned is None else warned)


def messages(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run() == 6
    return [str(each.message) for each in caught]


def test_one_warning_per_code_and_line_shared_by_the_parts_of_a_step():
    step = fallback()
    part = fallback(warned=step.warned)
    here = CaptureFailed("SFX102", "no", Location("a.py", 1, "f"), None)
    there = CaptureFailed("SFX102", "no", Location("a.py", 2, "f"), None)
    (first,) = messages(lambda: step.run(here, CALL))
    assert first == "step ran eagerly: [SFX102] a.py:1 in f: no"
    assert messages(lambda: step.run(here, CALL)) == messages(lambda: part.run(here, CALL)) == []
    assert len(messages(lambda: part.run(there, CALL))) == 1
    assert [(each.code, each.count) for each in step._report.fallbacks] == [("SFX102", 2)]
    assert [(each.code, each.count) for each in step._report.breaks] == [("SFX102", 2)]


@pytest.mark.parametrize("code", ["SFX202", "SFX203", "SFX208", "SFX209", "SFX210"])
def test_reasons_that_are_no_breaks(code):
    step = fallback(fullgraph=True)
    assert len(messages(lambda: step.run(CaptureFailed(code, "no", None, None), CALL))) == 1
    assert not step._report.breaks and step._report.fallbacks[0].code == code


def test_silent_runs():
    step = fallback()
    assert messages(lambda: step.run_silently(CaptureFailed("SFX206", "not yet", None, None), CALL)) == []
    assert not step._report.breaks and step._report.fallbacks[0].code == "SFX206"


@pytest.mark.parametrize("options", [{"fullgraph": True}, {"on_failure": "raise"}])
def test_an_error_on_request(options):
    ran = []
    step = fallback(lambda x, y: ran.append(x), **options)
    with pytest.raises(GraphBreakError, match="no"):
        step.run(CaptureFailed("SFX102", "no", None, None), CALL)
    assert not ran


def test_the_step_raises_what_the_capture_raised():
    def raising(x, y):
        raise ValueError("the step's own")

    step = fallback(raising)
    stop = CaptureFailed("SFX204", "ValueError: the step's own", None, None, raised=True)
    stop.__cause__ = ValueError("the step's own")
    with pytest.raises(ValueError, match="own"):
        step.run(stop, CALL)
    assert not step._report.breaks and step._report.fallbacks[0].code == "SFX202"
    stop.__cause__ = TypeError("another")
    with pytest.raises(ValueError, match="own"):
        step.run(stop, CALL)
    assert [each.code for each in step._report.breaks] == ["SFX204"]
