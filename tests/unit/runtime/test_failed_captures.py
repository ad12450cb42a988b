"""A capture that an operation's error ends is not tried again at every call."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

import sidefx_train

attempts: list[int] = []


@torch.library.custom_op("sidefx_tests::without_a_fake", mutates_args=())
def without_a_fake(x: torch.Tensor, wrong: bool) -> torch.Tensor:
    if wrong:
        raise RuntimeError("no such thing")
    return x + 1


@without_a_fake.register_fake
def _(x, wrong):
    attempts.append(len(x))
    raise RuntimeError("no such thing")


def test_an_operation_that_raises_only_in_captures():
    attempts.clear()
    step = sidefx_train.compile(lambda x: without_a_fake(x, False) * 2, backend="eager")
    counts = []
    for size in (3, 3, 3, 4, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert bool((step(torch.full((size,), 1.0)) == 4).all())
        counts.append(len(attempts))
    assert 0 < counts[0] == counts[1] == counts[2] < counts[3] == counts[4], counts
    assert step.report().fallback_count == 5, str(step.report())


def test_a_step_that_raises_is_captured_when_it_does_not():
    """The error of one call says nothing about the next, even with equal guards."""
    values = [torch.tensor(1.0), torch.tensor(0.0)]

    def step(x):
        if values[0] > 0:
            raise ValueError("too large")
        return x + 1

    compiled = sidefx_train.compile(step, backend="eager")
    with pytest.raises(ValueError, match="too large"):
        compiled(torch.ones(2))
    values[0].fill_(-1.0)
    for _ in range(3):
        assert bool((compiled(torch.ones(2)) == 2).all())
    assert compiled.report().replays >= 2, str(compiled.report())


class Holder:
    """An object that gets a lock at every call, which no capture can create again."""


class Key(str):
    """A text with a number, of which every capture reads the number."""

    def __new__(cls, number):
        made = super().__new__(cls, f"name {number}")
        made.number = number
        return made


def _attempts_of(argument, size=lambda i: 3, scale=False, calls=30):
    """Returns in which calls a step that cannot be captured was tried, if its argument changes at every call."""
    holder, tried = Holder(), []

    def step(x, value):
        holder.value = value
        holder.lock = threading.Lock()
        return x * value if scale else x + 1

    compiled = sidefx_train.compile(step, backend="eager")
    attempt = compiled._capturer.capture_and_compile
    compiled._capturer.capture_and_compile = lambda call: tried.append(i) or attempt(call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(calls):
            x, value = torch.ones(size(i)), argument(i)
            assert torch.equal(compiled(x, value), x * value if scale else x + 1)
            assert holder.value is value
    assert compiled.report().fallback_count == calls, str(compiled.report())
    return tried


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("argument", [int, float, lambda i: i * 0.5], ids=["int", "float", "half"])
def test_a_number_that_changes_is_tried_twice(argument, scale):
    """So is the number of the batch, which Lightning passes to every ``training_step``."""
    tried = _attempts_of(lambda i: argument(i + 3), scale=scale)
    assert tried == [0, 1], tried


def test_a_size_that_changes_is_tried_twice():
    assert _attempts_of(lambda i: None, size=lambda i: i + 3) == [0, 1]


def test_a_text_that_changes_is_tried_three_times():
    assert len(_attempts_of(lambda i: f"name {i}")) <= 3


def test_what_keeps_changing_is_tried_more_and_more_seldom():
    tried = _attempts_of(lambda i: Key(i), calls=300)
    assert tried == [0, 1, 2, 3, 4, 6, 10, 18, 34, 66, 130, 258], tried


def test_a_decision_that_stops_the_capture_is_one_side_of_a_number():
    """The other sides are captured, also after the number has become symbolic."""
    holder = Holder()

    def step(x, count):
        if count % 3 == 0:
            holder.lock = threading.Lock()
            return x
        return x + 1 if count % 3 == 1 else x * 2

    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in [0, 3, 6, 9, *range(60)]:
            x = torch.full((2,), float(i))
            assert torch.equal(compiled(x, i), (x, x + 1, x * 2)[i % 3])
    report = compiled.report()
    assert report.fallback_count + report.replays == 64 and report.replays >= 40, str(report)
    assert len(report.captures) <= 4, str(report)


def test_a_step_that_stays_as_it_is_is_asked_more_and_more_seldom():
    """Its guards are not evaluated at each call, and a change is noticed after a while."""
    reads, flags = [], {"wrong": True}

    def step(x):
        if flags["wrong"]:
            return without_a_fake(x, False) * 2
        return x * 4

    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(40):
            assert compiled(torch.ones(2)).eq(4).all()
        note = compiled._limits._note_held
        compiled._limits._note_held = lambda known: reads.append(known) or note(known)
        for _ in range(160):
            assert compiled(torch.ones(2)).eq(4).all()
        assert 1 < len(reads) < 10 and compiled.report().fallback_count == 200
        flags["wrong"] = False
        for _ in range(66):
            assert compiled(torch.ones(2)).eq(4).all()
    assert 0 < compiled.report().replays < 66
