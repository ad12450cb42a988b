"""Changing numbers as arguments of operators of torch's list: a fixed few, and all of them under ``make fuzz``."""

from __future__ import annotations

import pytest

from tests.fuzz.changing_numbers import BACKENDS, DIFFERS, EACH_VALUE, EAGER, KINDS, REPLAYS, cases, check

FIXED = ("huber_loss", "nn.functional.dropout2d", "lerp", "hinge_embedding", "logit", "pdist")

HALF = ("huber_loss", "lerp", "addcdiv")


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.every(2)
def test_a_few_replay(name):
    found = [check(case, "eager") for case in cases((name,))]
    assert found and all(outcome.kind == REPLAYS for outcome in found), found


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.every(2)
def test_a_few_in_half_precision(kind):
    found = [check(case, "inductor") for name in HALF for case in cases((name,), kind)]
    assert found and all(outcome.kind == REPLAYS for outcome in found), found


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_equal_eager_and_replay(backend):
    found = [check(case, backend) for case in cases()]
    assert not [outcome for outcome in found if outcome.kind == DIFFERS]
    assert not [outcome for outcome in found if outcome.kind in (EAGER, EACH_VALUE)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_all_in_half_precision(kind):
    found = [check(case, "inductor") for case in cases(kind=kind)]
    assert not [outcome for outcome in found if outcome.kind == DIFFERS]
