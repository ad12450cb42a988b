"""Changing numbers and integers as arguments of operators of torch's list: a fixed few, and all under ``make fuzz``."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import changing_integers
from tests.fuzz.changing_numbers import BACKENDS, DIFFERS, EACH_VALUE, EAGER, KINDS, REPLAYS, cases, check, operators

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


INTEGERS = (
    "diagonal_copy",
    "huber_loss",
    "topk",
    "nn.functional.avg_pool1d",
    "pixel_unshuffle",
    "tril",
    "normal.in_place",
)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.every(2)
def test_a_few_integers_replay(name):
    found = [check(case, "eager") for case in changing_integers.cases((name,))]
    assert found and all(outcome.kind == REPLAYS for outcome in found), found


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_integers_equal_eager_and_replay(backend):
    found = [check(case, backend) for case in changing_integers.cases()]
    assert not [outcome for outcome in found if outcome.kind == DIFFERS]
    assert not [outcome for outcome in found if outcome.kind in (EAGER, EACH_VALUE)]


@pytest.mark.slow
def test_every_exclusion_is_of_an_argument():
    """No argument is named that no operator has, and none twice."""
    names = set()
    for op in operators().values():
        for sample in _samples(op):
            for place in (*range(len(sample.args)), *sample.kwargs):
                name = changing_integers.argument_name(op, place)
                names |= {name, f"{name} of {op.name}", f"{name} of {op.full_name}"}
    tables = (*changing_integers.STRUCTURAL.values(), *changing_integers.RARE.values())
    excluded = [name for table in tables for name in table]
    assert len(excluded) == len(set(excluded))
    assert not set(excluded) - names


def _samples(op):
    try:
        return list(op.sample_inputs("cpu", torch.float32, requires_grad=False))
    except Exception:
        return []  # it takes no floats, or needs a library that is not installed
