"""Learning-rate schedulers stepped inside the step.

At its end they run behind the graph, before a tensor operation the prologue computes them: one capture.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler

import sidefx_train
from tests.support.parity import Program, batches, mlp, parity

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 10),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 10),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.3, 1.0, 20),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.95),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 50),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 50, 2.0),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=70, base_momentum=0.8),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=8, cycle_momentum=False),
    "warmup and cosine": lambda o: lr_scheduler.LambdaLR(
        o, lambda n: min(1.0, n / 10) * 0.5 * (1 + math.cos(math.pi * min(n, 60) / 60))
    ),
    "exp": lambda o: lr_scheduler.LambdaLR(o, lambda n: math.exp(-0.05 * n)),
    "log": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + math.log(1 + n) + math.log(2 + n, 10))),
    "pow": lambda o: lr_scheduler.LambdaLR(o, lambda n: math.pow(0.9, n)),
    "inverse square root": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / math.sqrt(max(n, 10))),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.98),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 10), lr_scheduler.CosineAnnealingLR(o, 50)], [10]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 5), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


AT_THE_END = {
    **SCHEDULERS,
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [5, 15]),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=10),
    "three phases": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30, three_phase=True),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.2, cooldown=1),
}


def program(make_scheduler, order: str):
    """Returns a program that calls a scheduler before or after ``zero_grad``, or before a tensor operation."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = make_scheduler(optimizer)
        rates: list[float] = []
        total = torch.zeros(3)
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)

        def advance(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach(), (loss.item(),) if plateau else ()

        def after(x, y):
            loss, metrics = advance(x, y)
            optimizer.zero_grad()
            scheduler.step(*metrics)
            rates.append(scheduler.get_last_lr()[0])
            return loss

        def before(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
            return loss.detach()

        def before_with_metric(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step(loss.item())
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
            return loss.detach()

        def between(x, y):
            loss, metrics = advance(x, y)
            scheduler.step(*metrics)
            total.add_(loss)
            rates.append(scheduler.get_last_lr()[0])
            optimizer.zero_grad()
            return loss

        step = {"after zero_grad": after, "before an operation": between}.get(order, before)
        if step is before and plateau:
            step = before_with_metric
        return Program(step, batches((5, 6), classes=3), (model, optimizer, scheduler, rates, total))

    return make


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.every(4)
def test_before_a_tensor_operation(name):
    parity(program(SCHEDULERS[name], "before an operation"), steps=40, captures=2 if name == "sequential" else 1)


@pytest.mark.parametrize("order", ["after zero_grad", "before zero_grad"])
@pytest.mark.parametrize("name", AT_THE_END)
@pytest.mark.every(4)
def test_at_the_end(name, order):
    report = parity(program(AT_THE_END[name], order), steps=25, captures=1)
    natively = any("runs natively" in note for note in report.captures[0].notes)
    assert natively == (name == "sequential"), "the prologue computes the steps of all others"
    assert "tangents" not in report.sources()["graph"] and ".grad" not in report.sources()["residual"]


def test_milestones_are_conditions():
    """Before a tensor operation, only steps at a milestone are captured again, or in parts."""
    make = program(lambda o: lr_scheduler.MultiStepLR(o, [10, 30]), "before an operation")
    report = parity(make, steps=40, whole=False, captures=None)
    assert report.graph_count <= 6 and not report.fallbacks


def test_numbers_that_change_together_cost_one_capture():
    settings = {"a": 0.5, "b": 2, "pair": (1, 2.5, "x")}

    @sidefx_train.compile(backend="eager")
    def step(x):
        return x * settings["a"] + settings["b"] * settings["pair"][0] - settings["pair"][1]

    x = torch.ones(3)
    for i in range(5):
        settings.update(a=0.5 + i, b=2 + i, pair=(1 + i, 2.5 * i, "x"))
        found = step(x)
        assert torch.equal(found, x * settings["a"] + settings["b"] * settings["pair"][0] - settings["pair"][1])
    assert sidefx_train.explain(step).graph_count == 2
