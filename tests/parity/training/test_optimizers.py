"""torch.optim captured by running it: state, hyperparameters and schedulers equal eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, batches, classifier, mlp, parity

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd_dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "sgd_nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd_weight_decay": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {}),
    "adam_weight_decay": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adam_amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw_foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw_single": (torch.optim.AdamW, {"foreach": False}),
    "adamw_fused": (torch.optim.AdamW, {"fused": True}),
    "adam_fused": (torch.optim.Adam, {"fused": True}),
    "sgd_fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "sgd_foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "adam_maximize": (torch.optim.Adam, {"maximize": True}),
}


def train(name: str) -> Program:
    cls, options = OPTIMIZERS[name]
    model = mlp()
    return classifier(model, cls(model.parameters(), **options), batches((5, 6), classes=3))


FIRST_STEP_DIFFERS = ("sgd_dampening", "sgd_fused")
"""The first update differs from the others (an undamped momentum buffer, a flag of the fused kernel)."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    parity(lambda: train(name), captures=2 if name in FIRST_STEP_DIFFERS else 1)


# AdamW is Adam with another weight decay.
@pytest.mark.parametrize("name", ["sgd_nesterov", pytest.param("adam", marks=pytest.mark.slow), "adamw", "adamw_fused"])
@pytest.mark.every(2)
def test_optimizer_inductor(name):
    parity(lambda: train(name), backend="inductor")


def test_several_param_groups():
    def make() -> Program:
        model = mlp()
        groups = [
            {"params": [model[0].weight], "lr": 0.02, "weight_decay": 0.0},
            {"params": [model[0].bias], "lr": 0.01},
            {"params": list(model[3].parameters()), "betas": (0.8, 0.99)},
        ]
        return classifier(model, torch.optim.AdamW(groups, lr=0.005), batches((5, 6), classes=3))

    parity(make)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_param_without_grad(cls):
    def make() -> Program:
        model = mlp()
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        return classifier(model, cls(model.parameters(), lr=0.01), batches((5, 6), classes=3))

    parity(make)


def test_frozen_layer():
    def make() -> Program:
        model = mlp()
        model[0].requires_grad_(False)
        return classifier(model, torch.optim.AdamW(model.parameters(), lr=0.01), batches((5, 6), classes=3))

    parity(make)


def test_two_optimizers():
    def make() -> Program:
        model = mlp()
        one = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        two = torch.optim.AdamW(model[3].parameters(), lr=0.01)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for optimizer in (one, two):
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, one, two))

    parity(make)


SCHEDULERS = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9),
    "one_cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=200),
}


@pytest.mark.parametrize(
    ("cls", "scheduler", "where"),
    [
        (torch.optim.SGD, "step", "outside"),
        (torch.optim.SGD, "one_cycle", "outside"),
        (torch.optim.AdamW, "step", "outside"),
        (torch.optim.AdamW, "one_cycle", "outside"),
        (torch.optim.AdamW, "step", "inside"),
    ],
)
@pytest.mark.every(2)
def test_scheduler_never_recaptures(cls, scheduler, where):
    """200 steps with a changing learning rate (and, for OneCycleLR, changing momentum or betas): one capture."""

    def make() -> Program:
        model = mlp(hidden=4)
        options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
        optimizer = cls(model.parameters(), lr=0.01, **options)
        schedule = SCHEDULERS[scheduler](optimizer)
        program = classifier(model, optimizer, batches((4, 6), classes=3))
        plain = program.step
        program.watch = (*program.watch, schedule)
        if where == "inside":

            def step(x, y):
                loss = plain(x, y)
                schedule.step()
                return loss

            program.step = step
        else:
            program.schedule = schedule  # type: ignore[attr-defined]
        return program

    def between(program: Program, index: int) -> None:
        if where == "outside" and index:
            program.schedule.step()  # type: ignore[attr-defined]

    if where == "inside":
        # StepLR's own Python branches on its counters: the first step, a plain step, a step that decays. Each is
        # captured once, and 200 steps need no fourth.
        parity(make, steps=200, between=between, captures=3)
        return
    report = parity(make, steps=200, between=between)
    assert not report.recaptures, f"a scheduler made the step be captured again:\n{report}"


def test_scheduler_inductor():
    def make() -> Program:
        model = mlp(hidden=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        program = classifier(model, optimizer, batches((4, 6), classes=3))
        program.schedule = SCHEDULERS["one_cycle"](optimizer)  # type: ignore[attr-defined]
        return program

    def between(program: Program, index: int) -> None:
        if index:
            program.schedule.step()  # type: ignore[attr-defined]

    report = parity(make, steps=40, between=between, backend="inductor")
    assert not report.recaptures, f"a scheduler made the step be captured again:\n{report}"


def test_changed_hyperparameters_never_recapture():
    """lr, betas, weight_decay and eps set by hand between calls are inputs of the graph."""

    def make() -> Program:
        model = mlp()
        return classifier(model, torch.optim.AdamW(model.parameters(), lr=0.01), batches((5, 6), classes=3))

    def between(program: Program, index: int) -> None:
        group = program.watch[1].param_groups[0]
        group["lr"] = 0.01 / (1 + index)
        group["betas"] = (0.9 - 0.01 * index, 0.99)
        group["weight_decay"] = 0.01 * (1 + index)

    report = parity(make, between=between)
    assert not report.recaptures, f"a hyperparameter made the step be captured again:\n{report}"


def test_optimizer_with_prior_state():
    """An optimizer that has already taken eager steps continues from its state."""

    def make() -> Program:
        model = mlp()
        program = classifier(model, torch.optim.AdamW(model.parameters(), lr=0.01), batches((5, 6), classes=3))
        for index in range(50, 53):
            program.step(*program.batch(index))
        return program

    parity(make)


def test_optimizer_closure():
    """``optimizer.step(closure)`` as Lightning and LBFGS users write it."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            def closure():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer))

    # Gradients exist from the second call on.
    parity(make, captures=None)


def test_a_step_writes_nothing_to_the_optimizers_groups():
    """Values that were only read must not be written back: each entry would cost at every replay."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    compiled(torch.ones(1, 2))
    effects = compiled.report().effects
    assert all(text.endswith(".grad") for text in effects), effects


class CountingSGD(torch.optim.SGD):
    """Has an ``_init_group`` with side effects."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.groups = []

    def _init_group(self, group, *lists):
        self.groups.append(len(group["params"]))
        return super()._init_group(group, *lists)


class AddsOne(torch.optim.Optimizer):
    """Has an ``_init_group`` with parameters of its own."""

    def __init__(self, params):
        super().__init__(params, {})
        self.groups = []

    def _init_group(self, held, group):
        held += group["params"]
        self.groups.append(len(held))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            held = []
            self._init_group(held, group)
            for parameter in held:
                parameter += 1


@pytest.mark.parametrize("cls", [CountingSGD, AddsOne])
def test_a_class_with_an_init_group_of_its_own(cls):
    """Regression: it also ran natively, on copies of the parameters, and its effects happened twice."""

    def train(compiled):
        torch.manual_seed(0)
        model = mlp()
        optimizer = cls(model.parameters())

        def step(x):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = sidefx_train.compile(step, backend="eager", fullgraph=True) if compiled else step
        for i in range(3):
            run(torch.full((5, 6), float(i)))
        return optimizer.groups, [parameter.detach().clone() for parameter in model.parameters()]

    (groups, expected), (found, actual) = train(False), train(True)
    assert found == groups == [len(expected)] * 3
    assert all(map(torch.equal, expected, actual))


@pytest.mark.parametrize("fused", [False, True])
def test_signs_of_zero_in_the_first_momentum(fused):
    """Regression: the buffer began with zeros, which lost the sign of gradients that a mask had made ``-0.0``."""

    def make():
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused)

        def step(x):
            (weight * torch.tensor([0.0, 1.0, 0.0, 1.0]) * x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return torch.copysign(torch.ones(4), optimizer.state[weight]["momentum_buffer"])

        return Program(step, lambda index: (torch.tensor([-1.0, 2.0, 3.0, -4.0]),), optimizer)

    parity(make, steps=3)
