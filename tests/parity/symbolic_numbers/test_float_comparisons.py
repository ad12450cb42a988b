"""Conditions of a step on float arithmetic, to the last bit: algebra adds in another order."""

from __future__ import annotations

import array
import math

import pytest
import torch

import sidefx_train
from tests.support.symbolic_numbers import Space, graphs_for


def branches_on_a_sum(rate, x):
    return x * 2 if rate + 0.1 + 0.2 > 0.7 else x * 3


def compares_equal(rate, x):
    return x * 2 if rate + 0.1 + 0.2 == 0.7 else x * 3


def compares_unequal(rate, x):
    return x * 2 if rate + 0.1 + 0.2 != 0.7 else x * 3


@pytest.mark.parametrize("step", [branches_on_a_sum, compares_equal, compares_unequal], ids=lambda step: step.__name__)
def test_a_branch_is_taken_by_the_sum_that_python_makes(step):
    """``0.4 + 0.1 + 0.2`` is 0.7, ``0.4 + (0.1 + 0.2)`` is more."""
    assert 0.4 + 0.1 + 0.2 == 0.7 < 0.4 + (0.1 + 0.2)
    compiled = sidefx_train.compile(step, backend="eager")
    for rate in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.4, 0.1):
        assert torch.equal(compiled(rate, torch.ones(1)), step(rate, torch.ones(1))), rate
    assert compiled.report().fallback_count == 0


@pytest.mark.parametrize("name", ["exp", "log", "log10", "log1p", "expm1", "erf", "tanh", "atan", "sqrt", "log2"])
def test_a_branch_on_a_function_of_a_changing_number(name):
    function = getattr(math, name)

    def step(rate, x):
        value = function(rate)
        return x * value if value > 0.3 else x + value

    compiled = sidefx_train.compile(step, backend="eager")
    for rate in (0.1, 0.2, 0.3, 0.9, 0.8, 2.5, 0.25):
        assert torch.equal(compiled(rate, torch.ones(2)), step(rate, torch.ones(2))), rate
    assert compiled.report().fallback_count == 0 and len(compiled.report().captures) <= 3


def cut_off(rate, x):
    return x * 2 if int((rate + 0.1 + 0.2) * 10) == 44 else x * 3


def test_a_sum_that_is_cut_off_is_the_one_that_python_makes():
    """``int((4.1 + 0.1 + 0.2) * 10)`` is 43; with ``4.1 + (0.1 + 0.2)`` it would be 44."""
    assert int((4.1 + 0.1 + 0.2) * 10) == 43
    compiled = sidefx_train.compile(cut_off, backend="eager")
    for rate in (4.0, 4.15, 4.12, 4.1, 4.16, 4.05, 4.1):
        assert torch.equal(compiled(rate, torch.ones(1)), cut_off(rate, torch.ones(1))), rate
    assert compiled.report().fallback_count == 0


def as_a_constant(space, k):
    space.rate = space.rate * 0.99 + 0.1
    total = space.rate + 0.1 + 0.2 + 0.3 + 1e-5
    return space.x * array.array("d", [total])[0], total


def as_a_key(space, k):
    space.rate *= 0.99
    total = 0.1 + space.rate + 0.2
    return {total: 1}, hash(total), space.x * 2


@pytest.mark.parametrize("step", [as_a_constant, as_a_key], ids=lambda step: step.__name__)
def test_a_sum_that_becomes_a_constant_holds_for_its_numbers(step):
    assert graphs_for(step, lambda: Space(x=torch.arange(6.0), rate=0.5), 5) == 5
