"""Instances that share one ``__dict__`` ("Borg"): effects of the step on one are visible in all, and in the dict."""

from __future__ import annotations

import pytest
import torch

import sidefx_train


class Shared:
    state = {}

    def __init__(self):
        self.__dict__ = self.state


class Begun:
    state = {}

    def __init__(self):
        self.__dict__ = Begun.state
        if not Begun.state:
            self.n, self.log = 0, []


class Alone:
    def __init__(self):
        self.n = 1


FIRST, SECOND = Shared(), Shared()
ONE, OTHER = Alone(), Alone()


def both_written(x):
    FIRST.n += 1
    SECOND.n += 1
    SECOND.log.append(FIRST.n)
    return x * FIRST.n


def set_and_deleted(x):
    SECOND.m = FIRST.n
    FIRST.k = getattr(SECOND, "m", None)
    del SECOND.m
    return x * FIRST.k + hasattr(FIRST, "m")


def made_in_the_step(x):
    begun = Begun()
    begun.n += 1
    begun.log.append(begun.n)
    return x * Begun().n


def by_the_dict(x):
    FIRST.n += 1
    Shared.state["z"] = FIRST.n
    return x * SECOND.z


def by_the_dict_first(x):
    Shared.state["n"] += 1
    FIRST.n += 1
    return x * SECOND.n


def between(x):
    begun = Begun()
    Begun.state["q"] = 3
    begun.w = begun.q
    return x * Begun.state["w"]


def three_of_them(x):
    FIRST.n += 1
    third = Shared()
    third.n += 1
    SECOND.n += 1
    return x * (FIRST.n + third.n), vars(SECOND) == vars(third), vars(FIRST) is vars(SECOND)


def leaves(x):
    third = Shared()
    third.n += 1
    return third


def come_to_be_one(x):
    ONE.n += 1
    OTHER.n += 1
    return x * ONE.n


STEPS = (
    both_written, set_and_deleted, made_in_the_step, by_the_dict, by_the_dict_first, between, three_of_them, leaves,
    come_to_be_one,
)  # fmt: skip


def _history(run):
    Shared.state.clear()
    Begun.state.clear()
    FIRST.n, FIRST.log = 1, []
    Begun()
    ONE.__dict__, OTHER.__dict__ = {"n": 1}, {"n": 1}
    history = []
    for call in range(5):
        result = run(torch.ones(1))
        if isinstance(result, Shared):
            result.late = call
            result = vars(result) is Shared.state
        history.append((repr(result), repr(Shared.state), repr(Begun.state), ONE.n, OTHER.n))
        if call == 1:
            Shared.state["extra"], FIRST.n = 1, 10
            OTHER.__dict__ = ONE.__dict__
        if call == 3:
            OTHER.__dict__ = {"n": 7}
    return history


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_is_done_to_one_is_done_to_all(step):
    compiled = sidefx_train.compile(step, backend="eager")
    assert _history(compiled) == _history(step)
    report = compiled.report()
    assert report.replays == 5 and not report.breaks, str(report)
