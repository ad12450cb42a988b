"""Schedulers that a step calls last: in the native rest, or deferred behind ``zero_grad``."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import sidefx_train
from tests.support.native_rest import lines_of, runs_natively
from tests.support.parity import Program, parity


def learning_rate(order, rate):
    def make() -> Program:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate(), foreach=False)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            if order == "after":
                optimizer.zero_grad()
            scheduler.step()
            if order == "before":
                optimizer.zero_grad()

        return Program(step, lambda index: (torch.randn(4, 3),), (model, optimizer, scheduler))

    return make


@pytest.mark.parametrize("order", ["after", "before"])
def test_a_learning_rate_in_a_tensor_belongs_to_the_graph(order):
    report = parity(learning_rate(order, lambda: torch.tensor(0.1)), steps=6, whole=False, captures=None)
    assert not any(runs_natively(report, i) for i in range(len(report.captures))), str(report)


class Telling(torch.optim.SGD):
    """An optimizer whose ``zero_grad`` reads what a scheduler writes."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.told = []

    def zero_grad(self, set_to_none=True):
        self.told.append(self.param_groups[0]["lr"])
        super().zero_grad(set_to_none)


class Inheriting(torch.optim.lr_scheduler.StepLR):
    """A scheduler of the program, whose steps the prologue does not compute."""


class Counting(torch.optim.lr_scheduler.StepLR):
    """A scheduler with a ``step`` of its own."""

    steps = 0

    def step(self, epoch=None):
        self.steps += 1
        super().step(epoch)
        return self.steps


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, Telling])
@pytest.mark.parametrize("scheduler_class", [Inheriting, Counting])
@pytest.mark.parametrize("between", ["nothing", "read", "call", "second"])
@pytest.mark.every(3)
def test_only_a_scheduler_right_before_zero_grad_is_deferred(optimizer_class, scheduler_class, between):
    def make() -> Program:
        model = nn.Linear(3, 1)
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        scheduler = scheduler_class(optimizer, 3)
        other = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        seen = []

        def nothing(x):
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        def read(x):
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()

        def call(x):
            model(x).square().mean().backward()
            optimizer.step()
            seen.append(scheduler.step())
            optimizer.zero_grad()

        def second(x):
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            other.step()
            optimizer.zero_grad()
            model.zero_grad()
            seen.append(optimizer.param_groups[0]["lr"])

        step = {"nothing": nothing, "read": read, "call": call, "second": second}[between]
        return Program(step, lambda index: (torch.randn(4, 3),), (model, optimizer, scheduler, other, seen))

    plain = optimizer_class is torch.optim.SGD and scheduler_class is not Counting and between in ("nothing", "second")
    report = parity(make, steps=8, captures=1 if plain else None)
    assert runs_natively(report) or not plain, str(report)


@pytest.mark.parametrize("order", ["after", "before"])
def test_a_warning_of_a_scheduler_names_the_programs_line(order):
    """``scheduler.step()`` before the first ``optimizer.step()``."""

    def make():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)

        def after(x):
            model(x).sum().backward()
            optimizer.zero_grad()
            scheduler.step()

        def before(x):
            model(x).sum().backward()
            scheduler.step()
            optimizer.zero_grad()

        return after if order == "after" else before

    def warned(step):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step(torch.ones(2, 3))
            step(torch.ones(2, 3))
        return [(str(each.message), each.filename, each.lineno) for each in found]

    want = warned(make())
    assert want and warned(sidefx_train.compile(make(), backend="eager")) == want


def test_an_error_of_a_deferred_scheduler():
    """Eager's error, from its line; gradients that ``zero_grad`` would have cleared are None already."""

    def make():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)

        def step(x):
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        return step, model, scheduler

    outcomes = []
    for wrap in (lambda fn: fn, lambda fn: sidefx_train.compile(fn, backend="eager")):
        step, model, scheduler = make()
        step = wrap(step)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.fill_(0.25)
        lines = [lines_of(step, torch.ones(2, 3)) for _ in range(4)]
        outcomes.append((lines, model.weight.tolist(), scheduler.last_epoch))
    assert outcomes[0] == outcomes[1] and outcomes[0][0][-1] is not None
