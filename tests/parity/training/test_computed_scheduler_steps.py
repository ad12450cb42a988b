"""Schedulers before tensor operations that do not read their results: averages of the weights, with one capture."""

from __future__ import annotations

import copy
import functools
import math
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sidefx_train
from tests.parity.training.test_schedulers import AT_THE_END
from tests.support.parity import Program, parity


class Ramped:
    """A moving average of weights whose decay ramps up."""

    def __init__(self, model):
        self.model, self.updates = copy.deepcopy(model), 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = min(0.99, (1 + self.updates) / (10 + self.updates))
        for mean, weight in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.mul_(decay).add_(weight, alpha=1 - decay)


class OfStates(nn.Module):
    """A moving average of a state dict."""

    def __init__(self, model):
        super().__init__()
        self.module = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model):
        for mean, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(0.9 * mean + 0.1 * value)


class Averaged(AveragedModel):
    def __init__(self, model):
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.update_parameters(model)

    def update(self, model):
        self.update_parameters(model)


def averaging(make_scheduler, average=Ramped, end=lambda state: None, optimizer=None, **options):
    """Returns a program that steps a scheduler and then averages the weights."""

    def make() -> Program:
        model = nn.Linear(4, 2)
        made = (optimizer or functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))(model.parameters())
        scheduler, mean = make_scheduler(made), average(model)
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        state = types.SimpleNamespace(optimizer=made, scheduler=scheduler, seen=[], total=torch.zeros(2), **options)

        def step(x):
            loss = model(x).square().mean()
            made.zero_grad()
            loss.backward()
            made.step()
            scheduler.step(*([loss.detach()] if plateau else []))
            mean.update(model)
            end(state)
            return loss.detach()

        return Program(step, lambda index: (torch.randn(3, 4),), (model, mean, state))

    return make


_PHASES = {"sequential": 2}


@pytest.mark.parametrize("name", AT_THE_END)
def test_one_capture(name):
    parity(averaging(AT_THE_END[name]), steps=28, captures=_PHASES.get(name, 1))


@pytest.mark.parametrize("average", [OfStates, Averaged])
@pytest.mark.parametrize("name", ["one cycle", "sequential", "plateau"])
def test_averages_of_libraries(name, average):
    parity(averaging(AT_THE_END[name], average), steps=25, captures=_PHASES.get(name, 1))


def test_under_inductor():
    parity(averaging(AT_THE_END["one cycle"]), steps=6, backend="inductor")
    parity(averaging(AT_THE_END["plateau"]), steps=6, backend="inductor")


def reads_the_rate(state):
    state.seen.append((state.scheduler.get_last_lr(), state.optimizer.param_groups[0]["lr"]))
    state.total.add_(1.0, alpha=state.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("name", ["step", "one cycle", "chained", "warmup and cosine", "warm restarts"])
def test_the_rate_is_read_by_the_graph(name):
    parity(averaging(AT_THE_END[name], end=reads_the_rate), steps=25)


def test_the_rate_that_a_loss_decides_is_read_by_the_graph():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        parity(averaging(AT_THE_END["plateau"], end=reads_the_rate), steps=12, captures=None, whole=False)


def test_the_rate_that_a_loss_decides_is_kept():
    def end(state):
        state.seen.append(state.optimizer.param_groups[0]["lr"])
        state.seen.append(state.scheduler.get_last_lr())

    parity(averaging(AT_THE_END["plateau"], end=end), steps=12)


@pytest.mark.parametrize("mode", ["triangular", "triangular2", "exp_range"])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, functools.partial(torch.optim.SGD, momentum=0.9)])
def test_momentum_is_cycled(mode, optimizer):
    def make(made):
        return lr_scheduler.CyclicLR(made, 0.01, 0.1, step_size_up=4, mode=mode, gamma=0.98)

    parity(averaging(make, optimizer=functools.partial(optimizer, lr=0.1)), steps=20)


def test_a_function_of_numpy():
    """An overflow is a warning of NumPy's, at the program's line."""

    def factor(n):
        return 0.5 * (1 + np.cos(np.pi * n / 20)) if n != 6 else float(np.exp(n * 200.0)) * 0 + 1.0

    make = averaging(lambda o: lr_scheduler.LambdaLR(o, factor))
    wrap = functools.partial(sidefx_train.compile, backend="eager", rng="eager")
    want = outcomes(make, lambda fn: fn, 5)
    assert outcomes(make, wrap, 5) == want
    report = parity(make, steps=5)
    assert len(report.captures) == 1


def test_groups():
    def optimizer(parameters):
        first, second = parameters
        groups = [{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2, "weight_decay": 0.1}]
        return torch.optim.AdamW(groups)

    def make(made):
        return lr_scheduler.LambdaLR(made, [lambda n: 0.9**n, lambda n: 1.0 if n < 4 else 0.5])

    parity(averaging(make, optimizer=optimizer), steps=12)


@pytest.mark.parametrize("first", ["step", "plateau"])
def test_two_schedulers_and_two_steps(first):
    """The second begins where the first has ended, within one call."""

    def make() -> Program:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one = AT_THE_END[first](optimizer)
        two = lr_scheduler.MultiStepLR(optimizer, [3, 7, 8, 20])
        mean = Ramped(model)

        def step(x):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            two.step()
            one.step(*([loss.item()] if first == "plateau" else []))
            if first == "step":
                two.step()
            mean.update(model)

        return Program(step, lambda index: (torch.randn(3, 3),), (model, optimizer, one, two, mean))

    parity(make, steps=14)


def outcomes(make, wrap, steps):
    torch.manual_seed(0)
    program = make()
    step, found = wrap(program.step), []
    for index in range(steps):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.manual_seed(index)
            try:
                found.append(step(*program.batch(index)).tolist())
            except (ValueError, ZeroDivisionError) as error:
                found.append((type(error), str(error)))
        found.append([(str(each.message), each.filename, each.lineno) for each in warned])
        found.append([weight.tolist() for weight in program.watch[0].parameters()])
        found.append([weight.tolist() for weight in program.watch[1].model.parameters()])
        found.append((program.watch[1].updates, program.watch[2].scheduler.last_epoch))
    return found


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
        lambda o: lr_scheduler.LambdaLR(o, lambda n: 1.0 if n < 5 else 1 / (6 - n)),
        lambda o: lr_scheduler.LambdaLR(o, lambda n: (1.0, 0.9, 0.5, 0.2, 0.1)[min(n, n if n < 3 else 4)]),
    ],
    ids=["too many steps", "an error of the program", "a table"],
)
def test_an_error_comes_before_the_average(make_scheduler):
    make = averaging(make_scheduler)
    wrap = functools.partial(sidefx_train.compile, backend="eager", rng="eager")
    assert outcomes(make, wrap, 9) == outcomes(make, lambda fn: fn, 9)


def test_a_warning_of_a_scheduler_before_the_optimizer():
    def make() -> Program:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mean, scheduler = Ramped(model), lr_scheduler.StepLR(optimizer, 2)

        def step(x):
            loss = model(x).square().mean()
            scheduler.step()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean.update(model)
            return loss.detach()

        return Program(
            step, lambda index: (torch.randn(3, 4),), (model, mean, types.SimpleNamespace(scheduler=scheduler))
        )

    wrap = functools.partial(sidefx_train.compile, backend="eager")
    want = outcomes(make, lambda fn: fn, 4)
    assert any("before `optimizer.step()`" in str(each) for each in want)
    assert outcomes(make, wrap, 4) == want


def test_a_function_with_effects_runs_once_a_step():
    seen = []

    def noting(n):
        seen.append(n)
        return 0.9**n if n < 4 else 0.1

    def make(optimizer):
        seen.clear()
        return lr_scheduler.LambdaLR(optimizer, noting)

    parity(averaging(make, seen_epochs=seen), steps=8, captures=None, whole=False)


@pytest.mark.parametrize("by", ["cell", "attribute", "list"])
def test_what_a_function_reads_may_change(by):
    """Also to what it was, and in the step itself."""

    def make() -> Program:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config, table, warmup = types.SimpleNamespace(warmup=3), [3.0, 5.0], 3

        def factor(n):
            bound = warmup if by == "cell" else config.warmup if by == "attribute" else table[0]
            return n / bound if n < bound else 1.0

        def change(value):
            nonlocal warmup
            warmup = config.warmup = value
            table[0] = float(value)

        scheduler, mean = lr_scheduler.LambdaLR(optimizer, factor), Ramped(model)
        state = types.SimpleNamespace(change=change, n=0)

        def step(x, within):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if within is not None:
                change(within)
            scheduler.step()
            mean.update(model)

        def batch(index):
            return torch.randn(3, 3), 6 if index in (9, 10) else None

        return Program(step, batch, (model, optimizer, scheduler, mean, state))

    def between(program, index):
        if index in (4, 6, 11):
            program.watch[-1].change({4: 9, 6: 3, 11: 20}[index])

    parity(make, steps=16, captures=None, between=between, whole=False)


def test_a_state_is_loaded_and_attributes_are_set():
    def between(program, index):
        scheduler = program.watch[2].scheduler
        if index == 5:
            scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 1, "_step_count": 2})
        if index == 8:
            scheduler.gamma = 0.5
        if index == 10:
            scheduler.step()

    report = parity(averaging(lambda o: lr_scheduler.StepLR(o, 3)), steps=14, captures=2, between=between)
    assert len(report.captures) == 2


class Own(lr_scheduler.LRScheduler):
    def get_lr(self):
        return [rate * (0.5 if self.last_epoch % 4 == 3 else 1.01) for rate in self.base_lrs]


def test_a_scheduler_of_the_program():
    parity(averaging(Own), steps=9, captures=None)


def test_a_rate_in_a_tensor():
    make = averaging(
        lambda o: lr_scheduler.StepLR(o, 3),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), foreach=False),
    )
    parity(make, steps=8, captures=None)


def test_a_list_of_rates_is_one_object():
    """That of a sequence is that of the scheduler it steps; others stay as they are."""

    def make() -> Program:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = AT_THE_END["sequential"](optimizer)
        first, second = scheduler._schedulers
        mean, seen = Ramped(model), []
        untouched = second._last_lr

        def step(x):
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            mean.update(model)

        def between():
            rates = scheduler._last_lr
            seen.append((rates is first._last_lr, rates is second._last_lr, second._last_lr is untouched))

        return Program(step, lambda index: (torch.randn(3, 3),), (model, scheduler, seen, between))

    parity(make, steps=14, captures=None, between=lambda program, index: program.watch[-1]())


def test_a_schedule_of_floats():
    """Counters of warm restarts may be floats."""

    def between(program, index):
        if index == 3:
            program.watch[2].scheduler.step(2.5)

    parity(averaging(AT_THE_END["warm restarts"]), steps=14, captures=None, between=between)


@pytest.mark.parametrize("metric", ["item", "tensor", "number"])
def test_metrics_of_a_plateau(metric):
    def make() -> Program:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1, cooldown=1, min_lr=1e-3)
        mean = Ramped(model)

        def step(x, number):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step({"item": loss.item(), "tensor": loss.detach(), "number": number}[metric])
            mean.update(model)
            return loss.detach()

        def batch(index):
            return torch.randn(3, 3), math.nan if index == 7 else index * 0.5

        return Program(step, batch, (model, optimizer, scheduler, mean))

    parity(make, steps=12, captures=3 if metric == "number" else 2)


def test_a_metric_of_several_elements_raises():
    def make() -> Program:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
        mean = Ramped(model)

        def step(x):
            scheduler.step(model(x).detach())
            mean.update(model)

        return Program(step, lambda index: (torch.randn(3, 3),), (model, optimizer, scheduler, mean))

    parity(make, steps=3, captures=None, whole=False)
