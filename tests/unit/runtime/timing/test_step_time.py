"""Time of a step on a loaded machine, and of one that waits."""

from __future__ import annotations

import sys
import time

import pytest

from sidefx_train.compile.runtime.timing import step_time
from sidefx_train.compile.runtime.timing.step_time import StepTime

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there the system tells why a thread stopped")


def test_sleep_counts():
    timed = StepTime()
    time.sleep(0.02)
    assert timed.seconds() >= 0.02


def test_time_of_other_processes_does_not_count(monkeypatch):
    passed = iter([0.0, 5.0])
    monkeypatch.setattr(step_time, "clock", lambda: next(passed))
    monkeypatch.setattr(step_time, "waits", lambda: 7)
    assert StepTime().seconds() < 1


def test_waiting_counts(monkeypatch):
    passed, waits = iter([0.0, 5.0]), iter([7, 8])
    monkeypatch.setattr(step_time, "clock", lambda: next(passed))
    monkeypatch.setattr(step_time, "waits", lambda: next(waits))
    assert StepTime().seconds() == 5.0
