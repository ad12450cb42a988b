"""Generators created, seeded, saved and set in a step: draws and final states equal eager's at every call."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import sidefx_train
from sidefx_train.errors import SideFXWarning

OUTSIDE = torch.Generator()


def made_and_seeded(x, log):
    generator = torch.Generator().manual_seed(3)
    return x + torch.rand(2, generator=generator)


def made_then_seeded(x, log):
    generator = torch.Generator(device="cpu")
    generator.manual_seed(len(log) + 5)
    y = x + torch.rand(2, generator=generator)
    log.append(generator.initial_seed())
    return y + torch.randn(2, generator=generator)


def made_from_a_state(x, log):
    generator = torch.Generator()
    generator.set_state(OUTSIDE.get_state())
    return x + torch.rand(2, generator=generator)


def seeded_from_outside(x, log):
    OUTSIDE.manual_seed(7)
    return x + torch.rand(2, generator=OUTSIDE)


def drawn_from_outside(x, log):
    return x + torch.rand(2, generator=OUTSIDE)


def default_generator(x, log):
    torch.default_generator.manual_seed(4)
    return x + torch.rand(2)


def forked(x, log):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        y = x + torch.rand(2)
    return y + torch.rand(2)


def repeated(x, log):
    state = torch.get_rng_state()
    y = torch.rand(2)
    torch.set_rng_state(state)
    return x + y - torch.rand(2)


def other_libraries(x, log):
    log.append((random.Random(3).random(), np.random.default_rng(3).random()))
    random.seed(3)
    np.random.seed(3)
    log.append((random.random(), np.random.rand()))
    return x


STEPS = [
    made_and_seeded, made_then_seeded, made_from_a_state, seeded_from_outside, drawn_from_outside, default_generator,
    forked, repeated, other_libraries,
]  # fmt: skip


def course(step: Any) -> list[Any]:
    seen: list[Any] = []
    for call in range(4):
        torch.manual_seed(call)
        OUTSIDE.manual_seed(call)
        log: list[Any] = []
        made = step(torch.full((2,), float(call)), log)
        seen.append((made.tolist(), log, torch.rand(2).tolist(), torch.rand(2, generator=OUTSIDE).tolist()))
    return seen


@pytest.mark.parametrize("step", STEPS)
def test_draws_are_those_of_eager(step: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert course(sidefx_train.compile(step, backend="eager")) == course(step)


@pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")
def test_a_saved_state_is_a_tensor():
    """Regression: ``isinstance(state, torch.Tensor)`` was false."""

    def step():
        state = torch.get_rng_state()
        kinds = [torch.is_tensor(state), isinstance(state, torch.Tensor), type(state).__name__]
        return kinds, state.clone() if kinds[2] == "Tensor" and torch.rand(()) < 2 else None, hasattr(state, "shape")

    compiled = sidefx_train.compile(step, backend="eager")
    for _ in range(2):
        outcomes = []
        for run in (step, compiled):
            torch.manual_seed(0)
            outcomes.append(str(run()))
        assert outcomes[0] == outcomes[1]


@pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")
@pytest.mark.parametrize("draws", ["before", "never", "after"])
def test_a_saved_state_that_leaves_the_step(draws):
    """As the context of a reentrant checkpoint has it, whose backward is called outside."""
    kept = []

    def step(x):
        y = x + torch.rand(2) if draws == "before" else x * 2
        kept.append(torch.get_rng_state())
        return y + torch.rand(2) if draws == "after" else y * 3

    compiled = sidefx_train.compile(step, backend="eager")
    for _ in range(3):
        found = []
        for run in (step, compiled):
            torch.manual_seed(0)
            found.append((run(torch.ones(2)), kept[-1], torch.get_rng_state()))
        assert all(map(torch.equal, *found))
    assert kept[-1] is not kept[-3]
    assert [each.code for each in compiled.report().breaks] == (["SFX110"] if draws == "after" else [])


def test_a_reentrant_checkpoint_whose_backward_is_outside():
    def trained(wrap):
        torch.manual_seed(0)
        block, last = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), torch.nn.Linear(4, 2)

        def forward(x):
            return last(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True))

        run, found = wrap(forward), []
        for i in range(3):
            x = torch.full((3, 4), float(i + 1), requires_grad=True)
            run(x).square().sum().backward()
            found += [x.grad, *(parameter.grad.clone() for parameter in (*block.parameters(), *last.parameters()))]
        return found, run

    found, compiled = trained(lambda forward: sidefx_train.compile(forward, backend="eager"))
    assert all(map(torch.equal, found, trained(lambda forward: forward)[0]))
    assert not compiled.report().fallbacks and not compiled.report().breaks
