"""When a step is not captured again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import sidefx_train
from sidefx_train.compile.pipeline.captured import CaptureFailed, StopGuard
from sidefx_train.compile.pipeline.run_context import Call
from sidefx_train.compile.runtime.capture_limits import CaptureLimits
from sidefx_train.compile.runtime.guard_failures import Missed
from sidefx_train.config import CompileConfig
from sidefx_train.errors import RecaptureLimitError


def limits(captures=0, unamortized=(), **options):
    return CaptureLimits(CompileConfig(**options), SimpleNamespace(captures=captures, unamortized=list(unamortized)))


def missed(label, old="1", new="2"):
    return Missed(label, old, new, None)


def test_captures():
    assert limits(captures=2, recapture_limit=3).reached(missed("x")) is None
    stop = limits(captures=3, recapture_limit=3).reached(missed("x"))
    assert stop.code == "SFX203" and stop.reason == "3 captures, and still changing: x (was 1, is 2)"
    stop = limits(captures=3, unamortized=["model"], recapture_limit=3).reached(None)
    assert stop.reason.endswith("model, which the program drops after a few calls")


def test_the_first_reason_for_a_value_stays():
    found = limits(captures=3, recapture_limit=3)
    reasons = {found.reached(missed("x", new=str(i))).reason for i in range(3)}
    assert len(reasons) == 1
    assert found.reached(missed("y")).reason not in reasons


def test_failed_captures():
    found = limits(recapture_limit=2)
    for i in range(8):
        assert found.reached(None) is None, i
        found.add_stop(CaptureFailed("SFX102", "no", None, None))
    assert found.reached(None).reason == "0 captures, and still changing: the reason the step cannot be captured"


def test_an_error_on_request():
    with pytest.raises(RecaptureLimitError, match="x \\(was 1, is 2\\)"):
        limits(captures=1, recapture_limit=1, on_failure="raise").reached(missed("x"))


def test_calls_that_would_fail_again():
    found = limits()
    assert found.stop_for(Call((1,), {})) is None
    found.add_stop(CaptureFailed("SFX201", "not guarded", None, None))
    stop = CaptureFailed("SFX102", "guarded", None, StopGuard(lambda args, kwargs: args == (1,), ()))
    found.add_stop(stop)
    assert found.stop_for(Call((1,), {})) is stop
    assert found.stop_for(Call((2,), {})) is None


def test_backend_failures():
    found = limits()
    stops = [CaptureFailed("SFX201", text, None, None) for text in ("first", "second")]
    found.add_backend_failure(stops[0])
    assert found.backend_stop is None
    found.add_backend_failure(stops[1])
    assert found.backend_stop is stops[1]


def test_calls_beyond_the_limit_try_the_entries_seldom_and_still_find_them():
    step = sidefx_train.compile(lambda x, word: x + len(word), backend="eager", recapture_limit=2, keep_slower=True)
    x = torch.ones(2)
    for i in range(120):
        assert torch.equal(step(x, "w" * (i % 7) + str(i)), x + i % 7 + len(str(i)))
    before = step.report().replays
    for _ in range(130):
        assert torch.equal(step(x, "0"), x + 1)
    replayed = step.report().replays - before
    assert 65 <= replayed < 130, "they were tried at the end of a pause, and after it each time"
    assert step.report().calls == 250
