"""``itertools.count`` from outside: its number is an input of the step, and the real one counts on after it."""

from __future__ import annotations

import itertools

import pytest
import torch

import sidefx_train


class Counting:
    def __init__(self, *args) -> None:
        self.steps, self.kept = itertools.count(*args), None

    def twice(self, x):
        return x * next(self.steps) + next(self.steps)

    def in_c_code(self, x):
        pairs = [number for _, number in zip("ab", self.steps)]
        return x * sum(itertools.islice(self.steps, 2)), pairs

    def left_early(self, x):
        for number in self.steps:
            if number % 3 == 2:
                break
            x = x + number
        return x

    def around_a_break(self, x):
        y = x * next(self.steps)
        if y.sum() > 1e6:
            y = y + 1
        return y * next(self.steps)

    def kept_in_another(self, x):
        self.kept = zip(range(9), self.steps)
        return x * next(self.kept)[1]

    def only_read(self, x):
        return x, self.steps


@pytest.mark.parametrize("start", [(), (4, 3), (5, -2), (1 << 40,)])
@pytest.mark.parametrize("name", ["twice", "in_c_code", "left_early", "around_a_break", "kept_in_another", "only_read"])
def test_counts_on(name, start):
    if name == "left_early" and start:
        start = (start[0] - start[0] % 3, 1)
    expected, found = Counting(*start), Counting(*start)
    step = sidefx_train.compile(getattr(found, name), backend="eager", fullgraph=name != "around_a_break")
    for i in range(6):
        x = torch.full((2,), float(i))
        assert repr(step(x)) == repr(getattr(expected, name)(x))
        assert repr(found.steps) == repr(expected.steps)
        if found.kept is not None:
            assert next(found.kept) == next(expected.kept)
        if i == 3:  # something else takes a number
            assert next(found.steps) == next(expected.steps)
    assert len(step.report().captures) <= 3 and not step.report().fallbacks


def test_another_count_takes_its_place():
    held = Counting(2)
    step = sidefx_train.compile(held.twice, backend="eager", fullgraph=True)
    assert step(torch.ones(1)).item() == 5
    held.steps = itertools.count(10, 10)
    assert step(torch.ones(1)).item() == 30
    held.steps = itertools.count(0)
    assert step(torch.ones(1)).item() == 1
    assert len(step.report().captures) == 2


def test_a_count_of_floats_is_advanced_natively():
    held, plain = Counting(0.5, 0.25), Counting(0.5, 0.25)
    step = sidefx_train.compile(held.twice, backend="eager")
    for _ in range(3):
        assert torch.equal(step(torch.ones(1)), plain.twice(torch.ones(1)))
    assert {each.code for each in step.report().breaks} == {"SFX103"}
