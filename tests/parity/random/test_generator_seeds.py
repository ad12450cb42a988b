"""Generators of torch that a step creates and seeds by a number that changes: one graph for all seeds."""

from __future__ import annotations

import random

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


def unused(seed):
    torch.Generator().manual_seed(seed)
    return X * 2


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


@pytest.mark.parametrize("step", [simple, chained, two, seeded_again, drawn, unused], ids=lambda step: step.__name__)
def test_one_graph_for_all_seeds(step):
    compiled = sidefx_train.compile(step, backend="eager")
    seeds = [3, 4, 4, 12345, 0, 3]
    assert history(compiled, seeds) == history(step, seeds)
    report = compiled.report()
    assert len(report.captures) <= 2 and not report.breaks and not report.fallbacks, f"{report}"


def test_seeds_that_torch_rejects():
    compiled = sidefx_train.compile(simple, backend="eager")
    seeds = [3, 4, 2**70, -5, 6, 2**63 - 1]
    assert history(compiled, seeds) == history(simple, seeds)


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


def test_under_inductor():
    compiled = sidefx_train.compile(simple, backend="inductor", rng="eager", keep_slower=True)
    for seed in [3, 4, 5, 3]:
        torch.testing.assert_close(compiled(seed), simple(seed))
    assert len(compiled.report().captures) <= 2 and not compiled.report().fallbacks, f"{compiled.report()}"
