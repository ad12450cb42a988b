"""What follows when a captured graph raises, an assumption does not hold, or a result differs."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from sidefx_train.compile.capture.resume.branch_history import BranchHistory
from sidefx_train.compile.capture.resume.driver import Parts
from sidefx_train.compile.runtime.fallback import Fallback
from sidefx_train.compile.runtime.graph_failures import GraphFailures, UsualBranches
from sidefx_train.compile.runtime.guard_failures import SpecializationState
from sidefx_train.config import CompileConfig
from sidefx_train.errors import AssumptionFailed, Location, UnfinishedError, VerificationError
from sidefx_train.report import StepReport

LINE = Location("a.py", 3, "f")


def entry(assumptions=(), commits=(), fresh=False):
    return SimpleNamespace(captured=SimpleNamespace(assumptions=assumptions, commits=commits), fresh=fresh)


def no_part(fn, name):
    raise AssertionError("no part is made")


class Step:
    """The collaborators of the failures of one step."""

    def __init__(self, *entries, **options):
        config = CompileConfig(**options)
        self.calls, self.uncounted = 0, 0
        self.report, self.specialization = StepReport(), SpecializationState(config, False, Parts(no_part))
        self.cache = SimpleNamespace(entries=list(entries), drop=lambda entry: self.cache.entries.remove(entry))
        fallback = Fallback(lambda x: x + 1, "step", config, self.report, set())
        self.history = BranchHistory()
        self.usual = UsualBranches(self.cache, self.specialization, self.history, lambda: False, False)
        self.failures = GraphFailures(
            config, self.report, self.cache, self.specialization, self.usual, fallback, lambda: self.calls, self.uncount
        )

    def uncount(self):
        self.uncounted += 1

    def fail(self, error):
        self.calls += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert self.failures.failed(error, (1,), {}) == 2


def test_an_error_makes_the_call_eager():
    step = Step(entry())
    step.fail(RuntimeError("no memory"))
    assert step.uncounted == 1 and len(step.cache.entries) == 1
    (found,) = step.report.fallbacks
    assert (found.code, found.reason) == ("SFX202", "RuntimeError: no memory") and not step.report.breaks


@pytest.mark.parametrize("kind", [VerificationError, UnfinishedError])
def test_errors_after_which_the_step_cannot_run_again(kind):
    step = Step(entry())
    error = kind("SFX205", "differs")
    with pytest.raises(kind) as raised:
        step.failures.failed(error, (1,), {})
    assert raised.value is error and not step.report.fallbacks


def test_state_that_the_capture_made_is_removed_if_the_first_run_raises():
    undone = []
    commit = (lambda: None, lambda: undone.append("state"))
    step = Step(entry(commits=(commit,)), entry(commits=(commit,), fresh=True), entry(fresh=True))
    step.fail(RuntimeError("no memory"))
    assert undone == ["state"] and len(step.cache.entries) == 2
    assert not any(each.fresh for each in step.cache.entries)


def test_frequent_failures_of_assumptions_end_them():
    step = Step(entry(), entry((LINE,)))
    for i in range(3):
        assert not step.specialization.current.assumes_nothing and len(step.cache.entries) == 2, i
        step.fail(AssumptionFailed())
    assert step.specialization.current.assumes_nothing and len(step.cache.entries) == 1
    assert [(each.code, each.location, each.count) for each in step.report.fallbacks] == [("SFX208", LINE, 3)]


def test_rare_failures_of_assumptions_do_not():
    step = Step(entry((LINE,)))
    for _ in range(10):
        step.calls += 50
        step.fail(AssumptionFailed())
    assert not step.specialization.current.assumes_nothing and step.cache.entries


def test_differences():
    step = Step()
    with pytest.warns(match="step runs operation by operation: .SFX205. an output"):
        step.failures.differs("an output")
    assert [each.code for each in step.report.breaks] == ["SFX205"]
    with pytest.raises(VerificationError, match="an output"):
        Step(on_failure="raise").failures.differs("an output")


def at_a_branch(branch):
    """Returns an entry that ends in front of a branch."""
    point = SimpleNamespace(native=False, location=LINE)
    suspension = SimpleNamespace(point=point, bridges=[SimpleNamespace(branch=branch)])
    return SimpleNamespace(captured=SimpleNamespace(suspension=suspension, assumptions=()), fresh=False)


def gone(step, branch, *truths):
    """Notes the ways of a branch, one in a call; returns the calls in which branches were settled."""
    found = []
    for call, truth in enumerate(truths):
        step.history.note(branch, truth)
        if step.history.end_call():
            found.append(call)
            step.usual.settle()
    return found


def test_a_branch_is_settled_after_ten_calls():
    branch = (gone.__code__, 7)
    step = Step(at_a_branch(branch))
    assert gone(step, branch, True, False, *[True] * 10) == [] and step.cache.entries
    assert gone(step, branch, True) == [0] and not step.cache.entries
    assert step.specialization.current.usual_truths == {(branch, True)}
    assert step.usual.take_trigger().location is LINE and step.usual.take_trigger() is None


def test_a_branch_that_goes_both_ways_in_one_call_is_not_settled():
    branch = (gone.__code__, 7)
    step = Step(at_a_branch(branch))
    for _ in range(50):
        step.history.note(branch, True)
        assert gone(step, branch, False) == []


def test_usual_branches_are_given_up_after_three_failures_in_sixty_calls():
    branch = (gone.__code__, 7)
    step = Step(at_a_branch(branch))
    gone(step, branch, *[True] * 10)
    step.cache.entries.append(entry(assumptions=(LINE,)))
    for calls in (100, 140, 170, 180):
        step.calls = calls
        step.fail(AssumptionFailed())
        assert bool(step.cache.entries) is (calls < 180)
    assert not step.usual.assumed and not step.specialization.current.assumes_nothing
    assert gone(step, branch, *[True] * 100) == [79]
