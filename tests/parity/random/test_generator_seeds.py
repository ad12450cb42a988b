"""Generators of torch that a step seeds by a number that changes, its own or the default one: one graph for all."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import sidefx_train

X = torch.arange(6.0)


def simple(seed):
    generator = torch.Generator()
    generator.manual_seed(seed)
    return X * torch.rand(6, generator=generator) + torch.randn(6, generator=generator)


def chained(seed):
    return X[torch.randperm(6, generator=torch.Generator().manual_seed(seed * 3 + 1))]


def two(seed):
    first, second = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    return torch.rand(6, generator=second) - torch.rand(6, generator=first) + torch.rand(6)


def seeded_again(seed):
    first, second = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(5)
    first.manual_seed(7)
    second.manual_seed(seed)
    return torch.rand(6, generator=second) - torch.rand(6, generator=first)


def drawn(seed):
    return X * torch.rand(6, generator=torch.Generator().manual_seed(random.randrange(1000)))


def default(seed):
    torch.manual_seed(seed)
    return X * torch.rand(6) + torch.nn.functional.dropout(X, 0.5)


def default_by_name(seed):
    generator = torch.manual_seed(seed)
    return X * torch.rand(6, generator=generator) + torch.rand(6)


def default_repeated(seed):
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    first = torch.rand(6)
    torch.set_rng_state(state)
    return X * first + torch.rand(6)


def all_of_them(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed + 1)
    return X * torch.rand(6) * random.random() * np.random.rand()


def unused(seed):
    torch.Generator().manual_seed(seed)
    return X * 2


STEPS = [simple, chained, two, seeded_again, drawn, unused]
if not torch.accelerator.is_available():
    STEPS += [default, default_by_name, default_repeated, all_of_them]


def history(fn, seeds):
    torch.manual_seed(0)
    random.seed(0)
    found = []
    for seed in seeds:
        try:
            found.append(fn(seed).tolist())
        except (RuntimeError, ValueError) as error:
            found.append(repr(error))
    return found, torch.rand(1), random.random()


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_one_graph_for_all_seeds(step):
    compiled = sidefx_train.compile(step, backend="eager")
    seeds = [3, 4, 4, 12345, 0, 3]
    assert history(compiled, seeds) == history(step, seeds)
    report = compiled.report()
    assert len(report.captures) <= 2 and not report.breaks and not report.fallbacks, f"{report}"


@pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")
@pytest.mark.parametrize("step", [simple, default], ids=lambda step: step.__name__)
def test_seeds_that_torch_rejects(step):
    compiled = sidefx_train.compile(step, backend="eager")
    seeds = [3, 4, 2**70, -5, 6, 2**63 - 1]
    assert history(compiled, seeds) == history(step, seeds)


def drawn_before(seed):
    first = torch.rand(6)
    torch.manual_seed(seed)
    return first - torch.rand(6)


def saved_before(seed):
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    drawn = torch.rand(6)
    torch.set_rng_state(state)
    return drawn - torch.rand(6)


def twice(seed):
    torch.manual_seed(1)
    first = torch.rand(6)
    torch.manual_seed(seed)
    return first - torch.rand(6)


def asked(seed):
    torch.manual_seed(seed)
    return torch.rand(6) * torch.initial_seed()


def decided(seed):
    torch.manual_seed(seed)
    return X * 2 if torch.rand(()) > 0.5 else X


def rejected(seed):
    torch.manual_seed(seed)
    return torch.linalg.cholesky(torch.eye(2) * (1 if seed != 4 else -1)) + torch.rand(2)


@pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")
@pytest.mark.parametrize(
    "step", [drawn_before, saved_before, twice, asked, decided, rejected], ids=lambda step: step.__name__
)
def test_other_uses_of_the_default_generator(step):
    compiled = sidefx_train.compile(step, backend="eager")
    seeds = [3, 5, 6, 4, 7, 8]
    assert history(compiled, seeds) == history(step, seeds)


@pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")
def test_a_generator_that_is_read_or_kept():
    kept = []

    def step(seed):
        generator = torch.Generator().manual_seed(seed)
        kept.append(generator.get_state().sum().item())
        return X * torch.rand(6, generator=generator)

    compiled = sidefx_train.compile(step, backend="eager")
    seeds = [3, 4, 5, 6]
    assert history(compiled, seeds) == history(step, seeds)
    assert kept[:4] == kept[4:]


@pytest.mark.parametrize("step", [simple, default], ids=lambda step: step.__name__)
def test_under_inductor(step):
    compiled = sidefx_train.compile(step, backend="inductor", rng="eager", keep_slower=True)
    for seed in [3, 4, 5, 3]:
        torch.testing.assert_close(compiled(seed), step(seed))
    assert len(compiled.report().captures) <= 2 and not compiled.report().fallbacks, f"{compiled.report()}"
