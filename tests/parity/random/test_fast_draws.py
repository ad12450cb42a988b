"""``rng="fast"``: other numbers than eager's, of the same distribution, and never the same twice."""

from __future__ import annotations

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F

import sidefx_train

COUNT = 4096
DRAWS = {
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "normal of a number and a tensor": lambda x: torch.normal(0.0, x.abs()),
    "normal of a tensor and a number": lambda x: torch.normal(x, 1.0),
    "normal of numbers": lambda x: torch.normal(0.0, 1.0, (COUNT,)),
    "Normal": lambda x: D.Normal(x, x.exp()).sample(),
    "Dirichlet": lambda x: D.Dirichlet(x.exp().reshape(64, 64)).sample(),
    "Gamma": lambda x: D.Gamma(x.exp(), x.exp()).sample(),
    "Categorical": lambda x: D.Categorical(logits=x.reshape(64, 64)).sample(),
    "uniform": lambda x: torch.zeros(COUNT).uniform_(),
    "rand": lambda x: torch.rand(COUNT),
    "permutation": lambda x: torch.randperm(COUNT),
    "dropout": lambda x: F.dropout(x, 0.3),
    "bernoulli": lambda x: torch.zeros(COUNT).bernoulli_(0.3),
    "gumbel": lambda x: F.gumbel_softmax(x.reshape(64, 64)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.reshape(1, 4, 32, 32)] * 3, dropout_p=0.3),
}


@pytest.mark.parametrize("rng", ["fast", pytest.param("eager", marks=pytest.mark.slow)])
def test_two_draws_with_equal_arguments_differ(rng):
    """Regression: all calls of ``torch.normal``, so all samples of ``Normal``, were the same numbers."""

    def draw(x):
        return {name: (function(x), function(x)) for name, function in DRAWS.items()}

    step = sidefx_train.compile(draw, warmup="now", rng=rng)
    x = torch.randn(COUNT)
    calls = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        calls.append(step(x))
    assert len(step.report().captures) == 1
    for name in DRAWS:
        (first, second), (later, _), again = (call[name] for call in calls)
        assert not torch.equal(first, second), name
        assert not torch.equal(first, later), name
        assert torch.equal(first, again[0]) and torch.equal(second, again[1]), name


def test_uniform_numbers_in_half_precision_are_below_one():
    """Regression: one of 512 in bfloat16 was 1, so that an index was out of range."""
    size = 1 << 16

    def draw(x):
        numbers = torch.rand_like(x), torch.rand(size, dtype=torch.float16), torch.rand(size, dtype=torch.bfloat16)
        return numbers, [(each * 8).floor().long() for each in numbers], [torch.log(1 - each) for each in numbers]

    step = sidefx_train.compile(draw, warmup="now")
    numbers, places, logarithms = step(torch.empty(size, dtype=torch.bfloat16))
    for each, place, logarithm in zip(numbers, places, logarithms, strict=True):
        least = torch.finfo(each.dtype).eps / 4
        assert each.max() < 1 and (each == 0).float().mean() < 2 * least
        assert place.max() == 7 and torch.isfinite(logarithm).all()
        assert abs(each.double().mean() - (0.5 - least)) < 5 * (1 / 12 / size) ** 0.5


def test_integers_of_wide_ranges_and_of_geometric_distributions():
    """Regression: the first were all the lower bound, the second all 1."""

    def draw():
        wide = torch.randint(-(2**63), 2**63 - 1, (COUNT,))
        return wide, torch.zeros(COUNT, dtype=torch.int64).geometric_(0.3)

    step = sidefx_train.compile(draw, warmup="now")
    wide, trials = step()
    assert len(step.report().captures) == 1
    assert len(wide.unique()) == COUNT and abs((wide > 0).double().mean() - 0.5) < 5 * 0.5 / COUNT**0.5
    assert abs(trials.double().mean() - 1 / 0.3) < 5 * (0.7**0.5 / 0.3) / COUNT**0.5


def test_numbers_in_double_precision_are_not_those_of_float32():
    """Regression: there were 2**24 different numbers in float64."""
    size = 1 << 17

    def draw(x):
        uniform = torch.rand(size, dtype=torch.float64), torch.rand_like(x), torch.empty_like(x).uniform_()
        return uniform, (torch.randn(size, dtype=torch.float64), torch.randn_like(x), torch.empty_like(x).normal_())

    uniform, normal = sidefx_train.compile(draw, warmup="now")(torch.zeros(size, dtype=torch.float64))
    for numbers in (*uniform, *normal):
        assert numbers.dtype is torch.float64 and len(numbers.unique()) == size
        assert (numbers.float().double() == numbers).double().mean() < 0.01
    for numbers in uniform:
        assert 0 <= numbers.min() and numbers.max() < 1
        assert abs(numbers.mean() - 0.5) < 5 * (1 / 12 / size) ** 0.5
        deciles = torch.histc(numbers.float(), 10, 0, 1) / size
        assert (deciles - 0.1).abs().max() < 5 * (0.1 / size) ** 0.5
    for numbers in normal:
        assert abs(numbers.mean()) < 5 / size**0.5 and abs(numbers.var() - 1) < 5 * (2 / size) ** 0.5
        assert abs((numbers**4).mean() - 3) < 5 * (96 / size) ** 0.5
        assert abs((numbers.abs() < 1).double().mean() - 0.6827) < 5 * (0.25 / size) ** 0.5
