"""Draws before a replay, and taking them back (`compile/common/draws/host_draws.py`)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sidefx_train.compile.common.draws.draw import Draw, EmptyTensor, TorchDraw
from sidefx_train.compile.common.draws.generator_states import copy_of, is_generator, is_global
from sidefx_train.compile.common.draws.host_draws import HostDraws

MISS = object()
GENERATORS = [random.Random(1), np.random.RandomState(1), np.random.default_rng(1)]


def draws(generator):
    function = type(generator).random
    return HostDraws((Draw(0, function, generator, (), {}), Draw(1, function, generator, (), {})), [0, 0])


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


@pytest.mark.parametrize("foretells", [True, False])
def test_numbers_of_torch_are_foretold_or_drawn_for_good(foretells):
    aten = torch.ops.aten
    mask = TorchDraw(None, aten.bernoulli_.float, (EmptyTensor((3, 5), (1, 3), torch.float32), 0.5), {})
    number, place = TorchDraw(0, aten.rand.default, ([],), {}), TorchDraw(1, aten.randint.low, (0, 9, [1]), {})
    made = HostDraws((mask, number, place), [0.0, 0], foretells)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    torch.empty(5, 3).t().bernoulli_(0.5)
    wanted = [torch.rand([]).item(), torch.randint(0, 9, (1,)).item()]
    after = torch.get_rng_state()
    for result, state in ((1, before if foretells else after), (MISS, before)):
        torch.set_rng_state(before)
        assert made.before(lambda args, kwargs: result, MISS)((), {}) is result
        assert made.values == wanted and type(made.values[1]) is int
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda each: type(each).__name__)
def test_draws_are_not_taken_back_behind_those_of_another_thread(generator):
    made = draws(generator)
    made.draw()
    other = generator.random()  # of another thread
    made.take_back()
    assert generator.random() not in (other, *made.values), "a number was drawn twice"


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda each: type(each).__name__)
def test_draws_are_taken_back_again_and_again(generator):
    """A copy of the generator, by which that is checked, serves many times."""
    made = draws(generator)
    for _ in range(3):
        before = copy_of(generator)
        made.draw()
        made.take_back()
        assert generator.random() == before.random()
    made.draw()
    other = generator.random()  # of another thread
    made.take_back()
    assert generator.random() not in (other, *made.values), "a number was drawn twice"
