"""Draws whose arguments are results of earlier draws, or arithmetic with them; draws with probabilities."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sidefx_train
from tests.support.parity import Program, parity
from tests.support.training_steps import stacked


def between(program, index):
    """Keeps the random state after every call; :func:`parity` seeds before each."""
    program.watch[-1].append(torch.get_rng_state())


def crop(x, top, left, height, width):
    """Returns a window as torchvision's ``crop`` does, which may have to pad the image."""
    bottom, right = top + height, left + width
    if top < 0 or left < 0 or bottom > x.shape[-2] or right > x.shape[-1]:
        padding = [max(-left, 0), max(right - x.shape[-1], 0), max(-top, 0), max(bottom - x.shape[-2], 0)]
        return F.pad(x[..., max(top, 0) : bottom, max(left, 0) : right], padding)
    return x[..., top:bottom, left:right]


def test_a_window_at_a_place_whose_bounds_are_drawn():
    def make():
        model = torch.nn.Conv2d(3, 4, 3)

        def step(x):
            height, width = (torch.randint(6, 13, (1,)).item() for _ in range(2))
            top = torch.randint(0, x.shape[-2] - height + 1, (1,)).item()
            left = torch.randint(0, x.shape[-1] - width + 1, (1,)).item()
            model.zero_grad()
            window = crop(x, top, left, height, width)
            loss = model(F.interpolate(window, size=(8, 8), mode="bilinear")).square().mean()
            loss.backward()
            return loss.detach()

        return Program(
            step, lambda i: (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(i)),), [model, []]
        )

    report = parity(make, steps=16, captures=None, rng="eager", between=between)
    assert len(report.captures) <= 3 and not report.breaks and not report.fallbacks, str(report)


OTHERS = {
    "torch, then Python": lambda: random.randint(0, int(torch.randint(3, 30, (1,)))),
    "Python, then torch": lambda: int(torch.randint(0, random.randint(3, 30), (1,))),
    "torch, NumPy, torch": lambda: int(torch.randint(0, int(np.random.randint(1, 3 + int(torch.rand(()) * 9))), (1,))),
    "bounds of floats": lambda: torch.empty(1).uniform_(0.0, 1 + random.random()).item(),
    "deviation": lambda: torch.empty(1).normal_(0.0, torch.rand(()).item() + 0.1).item(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_draws_of_several_generators_depend_on_each_other(name):
    def step(x):
        number = OTHERS[name]()
        return x * number if number > -100 else x

    compiled = sidefx_train.compile(step, backend="eager", rng="eager")
    found = []
    for run in (step, compiled):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        results = [run(torch.ones(2)) for _ in range(10)]
        found.append((results, torch.get_rng_state(), random.getstate(), np.random.get_state()[1]))
    assert repr(found[0]) == repr(found[1])
    assert torch.equal(found[0][1], found[1][1]) and len(compiled.report().captures) <= 2, str(compiled.report())


def test_the_error_of_drawn_bounds_is_eagers():
    def step(x):
        high = torch.randint(-3, 3, (1,)).item()
        return x * int(torch.randint(-1, high, (1,))) if high > -10 else x

    compiled = sidefx_train.compile(step, backend="eager", rng="eager")
    found = []
    for run in (step, compiled):
        torch.manual_seed(0)
        found.append([])
        for _ in range(12):
            try:
                found[-1].append(run(torch.ones(2)).tolist())
            except RuntimeError as error:
                found[-1].append(str(error))
        found[-1].append(torch.get_rng_state().tolist())
    assert found[0] == found[1]
    assert any(isinstance(each, str) for each in found[0])


CHANCES = [0.3, 0.1, 0.6]
CHOICES = {
    "multinomial": lambda: int(torch.multinomial(torch.tensor(CHANCES), 1)),
    "normalized": lambda: torch.multinomial(torch.tensor(CHANCES) / sum(CHANCES), 1).item(),
    "bernoulli": lambda: int(torch.bernoulli(torch.tensor(0.4))),
    "index": lambda: int(torch.randint(0, 3, (1,))),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_layer_is_chosen_from_a_tuple_once_each(name):
    def body(model, x):
        return (torch.sin, torch.cos, torch.tanh)[CHOICES[name]()](model[0](x)).square().mean()

    report = parity(stacked(body), steps=12, captures=None, between=between)
    assert len(report.captures) <= 3 and not report.breaks, str(report)


def test_probabilities_that_a_model_computes_are_not_foretold():
    def body(model, x):
        y = model[0](x)
        action = torch.multinomial(y.softmax(-1).mean(0), 1).item()
        return (y * 2 if action == 0 else y).square().mean()

    parity(stacked(body), steps=6, captures=None, whole=False, between=between)
