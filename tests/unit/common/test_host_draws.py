"""Draws before a replay, and taking them back (`compile/common/host_draws.py`)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sidefx_train.compile.common.host_draws import Draw, HostDraws, copy_of, is_generator, is_global

MISS = object()
GENERATORS = [random.Random(1), np.random.RandomState(1), np.random.default_rng(1)]


def draws(generator):
    function = type(generator).random
    return HostDraws((Draw(function, generator, (), {}), Draw(function, generator, (), {})), [])


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda generator: type(generator).__name__)
@pytest.mark.parametrize(("result", "keep", "advances"), [(1, True, True), (MISS, True, False), (1, False, False)])
def test_a_replay_that_misses_leaves_the_generator(generator, result, keep, advances):
    before, other = copy_of(generator), copy_of(generator)
    made = draws(generator)
    seen = []
    replay = made.before(lambda args, kwargs: seen.append(list(made.values)) or result, MISS, keep)
    assert replay((), {}) is result
    assert seen == [[other.random(), other.random()]]
    assert generator.random() == (other if advances else before).random()


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda generator: type(generator).__name__)
def test_a_failed_graph_leaves_the_generator(generator):
    other, made = copy_of(generator), draws(generator)
    made.draw()
    failed = made.taken_back_before(lambda error: (error, generator.random()))
    assert failed("why") == ("why", other.random())


def test_a_gaussian_that_is_kept_for_later_is_copied_too():
    for generator, draw in (
        (random.Random(2), random.Random.gauss),
        (np.random.RandomState(2), np.random.RandomState.normal),
    ):
        draw(generator, 0, 1)
        copy = copy_of(generator)
        assert [draw(copy, 0, 1) for _ in range(3)] == [draw(generator, 0, 1) for _ in range(3)]


def test_only_exact_classes():
    class Own(random.Random):
        pass

    assert all(map(is_generator, GENERATORS)) and not is_generator(Own()) and not is_generator(random)
    assert is_global(random.random.__self__) and not is_global(GENERATORS[0])
