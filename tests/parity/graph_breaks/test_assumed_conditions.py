"""Assumed conditions on tensors: one graph, which checks them; a step that violates one runs eagerly."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.conditions import (
    FORMS,
    asserting_a_number,
    by_math,
    difference_with_itself,
    raising,
    raising_in_parts,
    raising_twice,
    skipping,
    times_zero,
)
from tests.support.parity import Program, mlp, parity, run, same

BAD = (3, 6)
"""Calls whose batch violates the conditions."""


NAN, INFINITE = -1.0, 0.0
"""Bases whose power of -0.5 is NaN or infinite."""


def batch(i: int, bad: float = NAN):
    generator = torch.Generator().manual_seed(i)
    x, y = torch.randn(6, 6, generator=generator), torch.randint(0, 3, (6,), generator=generator)
    return x, y, torch.tensor([1.0, bad if i in BAD else 1.0])


def training(unwanted, bad=NAN, fused=True):
    """Returns a step with buffers, random numbers, an optimizer and side effects on both sides of the condition."""

    def make() -> Program:
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
        log = {"calls": 0, "skipped": 0, "losses": []}

        def step(x, y, scale):
            log["calls"] += 1
            loss = F.cross_entropy(model(x), y) * scale.pow(-0.5).prod()
            if unwanted(loss):
                log["skipped"] += 1
                return None
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log["losses"].append(loss.detach())
            return loss.detach()

        return Program(step, lambda i: batch(i, bad), (model, optimizer, log))

    return make


def check_assumed(make, backend="eager", fallbacks=len(BAD), steps=9, captures=1):
    options = {"rng": "eager"} if backend == "inductor" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        report = parity(make, steps=steps, backend=backend, whole=False, captures=captures, **options)
    assert not report.breaks, f"{report}"
    assert [record.code for record in report.fallbacks] == ["SFX208"] * bool(fallbacks), f"{report}"
    assert report.fallback_count == fallbacks, f"{report}"
    return report


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.covering(1)
def test_one_graph(form, backend):
    check_assumed(training(form), backend)


OFTEN = ((skipping, False), (raising_in_parts, True), (asserting_a_number, False))
"""Every form but ``difference_with_itself`` (its graph differs from ``skipping`` in the condition), both updates."""


@pytest.mark.parametrize(
    ("fused", "form"),
    [
        pytest.param(
            fused, form, marks=() if (form, fused) in OFTEN else pytest.mark.slow, id=f"{fused}-{form.__name__}"
        )
        for fused in (True, False)
        for form in (skipping, raising_in_parts, asserting_a_number, difference_with_itself)
        for often in [(form, fused) in OFTEN]
    ],
)
@pytest.mark.every(3)
def test_inductor(form, fused):
    check_assumed(training(form, fused=fused), "inductor")


@pytest.mark.parametrize("form", [by_math, times_zero, raising_twice], ids=lambda form: form.__name__)
def test_infinity(form):
    check_assumed(training(form, bad=INFINITE))


def test_the_report_says_so():
    report = check_assumed(training(raising))
    (note,) = [note for note in report.captures[0].caveats if "assumes conditions" in note]
    line = raising.__code__.co_firstlineno + 1
    assert f"{raising.__code__.co_filename}:{line} in raising" in note
    assert f":{line}" in str(report.fallbacks[0].location)


def test_gradients_are_asked():
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        skipped = []

        def step(x, y, scale):
            (F.cross_entropy(model(x), y) * scale.pow(-0.5).prod()).backward()
            if any(p.grad.isnan().any() for p in model.parameters()):
                skipped.append(True)
            else:
                optimizer.step()
            optimizer.zero_grad()

        return Program(step, batch, (model, optimizer, skipped))

    check_assumed(make)


def test_distributions():
    """They check their parameters and values, and raise."""

    def make() -> Program:
        policy = mlp()
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)

        def step(x, y, scale):
            chosen = torch.distributions.Categorical(logits=policy(x) * scale.pow(-0.5).prod(), validate_args=True)
            action = chosen.sample()
            loss = -(chosen.log_prob(action) * y).mean() - 0.1 * chosen.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach(), action

        return Program(step, batch, (policy, optimizer))

    check_assumed(make)


def test_caught():
    """The step may catch the exception: a rare path, but a valid one."""

    def check(loss):
        try:
            return raising(loss)
        except FloatingPointError:
            return True

    check_assumed(training(check))


def test_of_the_first_call():
    def make() -> Program:
        program = training(skipping)()
        return Program(program.step, lambda i: batch(i + BAD[0]), program.watch)

    check_assumed(make, steps=7, captures=2)  # the optimizer state that the first call created is rolled back


def test_not_for_ever():
    """If the condition is violated call after call, the step is captured in parts around it."""
    calls = 8

    def make() -> Program:
        program = training(skipping)()
        return Program(program.step, lambda i: batch(BAD[0]), program.watch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        report = parity(make, steps=calls, captures=None, whole=False)
    assert report.fallback_count == 3 and report.replays == calls - 3, f"{report}"
    assert {record.code for record in report.breaks} == {"SFX101"}


def test_rare_ones_are_not_doubted():
    """Four violations in 250 calls are rare enough."""

    def make() -> Program:
        program = training(skipping)()
        return Program(program.step, lambda i: batch(BAD[0] if i % 60 == 59 else 0), program.watch)

    check_assumed(make, steps=250, fallbacks=4)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_backward_outside(backend):
    """A graph with a separate backward cannot contain assumed conditions: the branch runs natively behind the graph."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(x, y, scale):
            loss = F.cross_entropy(model(x), y) * scale.pow(-0.5).prod()
            raising(loss)
            return loss

        return Program(loss_of, batch, (model, optimizer))

    report = parity(make, steps=5, backend=backend)
    assert any("runs natively" in note for note in report.captures[0].notes)


def test_both_sides_raise():
    def step(x, y, scale):
        if (x @ x.T).sum() > 0:
            raise ValueError("more")
        raise ValueError("less")

    report = parity(lambda: Program(step, batch), steps=5, captures=None)
    assert any("runs natively" in note for note in report.captures[0].notes)


def test_within_a_branch_of_cond():
    def step(x, y, scale):
        def one(x):
            if torch.isnan(x.sum()):
                raise ValueError("nan")
            return x * 2

        return torch.cond(y.sum() > 6, one, lambda x: x * 3, (x,))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        report = parity(lambda: Program(step, lambda i: batch(0)), steps=3, captures=None, whole=False)
    assert report.fallback_count or report.breaks


def test_what_was_asked_is_written_later():
    """The condition applies to the tensor's value at that point."""

    def make() -> Program:
        def step(x, y, scale):
            total = x.sum() * scale.pow(-0.5).prod()
            value = total.item()
            total.fill_(1.0)
            if value != value:
                raise ValueError("no number")
            return total, value

        return Program(step, batch)

    for backend in ("eager", "aot_eager"):
        check_assumed(make, backend)


NUMBERS = [1.0, 2.0, math.nan, 3.0, math.inf, -math.inf, 4.0, math.nan, 1e-17, 1e17, 0.1, -0.0]


@pytest.mark.parametrize(
    "question",
    [
        lambda v: v == v,
        lambda v: v != v,
        lambda v: v <= v,
        lambda v: v - v == 0,
        lambda v: v * 0 == 0,
        lambda v: (v + 1.0) - v == 1.0,
        lambda v: v + 1.0 > v,
        lambda v: v * v >= 0,
        lambda v: abs(v) == v or abs(v) == -v,
    ],
)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.covering(1)
def test_algebra_is_not_arithmetic(question, inside, backend):
    """For NaN, infinity and rounded values, floating-point comparisons differ from algebra."""

    def step(x, v):
        value = v.sum().item() if inside else v
        return x * 2 if question(value) else x * 3

    def arguments(i):
        v = NUMBERS[i]
        return torch.ones(2), torch.tensor([v, 0.0], dtype=torch.float64) if inside else v

    def make() -> Program:
        return Program(step, arguments)

    expected = run(make, len(NUMBERS), lambda fn: fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        found = run(make, len(NUMBERS), lambda fn: sidefx_train.compile(fn, backend=backend))
    for i, (want, have) in enumerate(zip(expected, found, strict=True)):
        same(want.outcome, have.outcome, f"{NUMBERS[i]}", True)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.every(2)
def test_a_size_from_data_that_may_only_raise(backend):
    """Metrics count distinct labels; the check is a condition on the size of a result."""

    def make() -> Program:
        model = mlp()

        def step(x, y):
            if len(torch.unique(y)) > 3:
                raise RuntimeError("too many labels")
            if (y > 1).nonzero().shape[0] * 2 > 9:
                raise ValueError("too large")
            loss = F.cross_entropy(model(x), y % 3)
            model.zero_grad()
            loss.backward()
            return loss.detach()

        labels = [[0, 1, 1, 0, 0], [0, 1, 2, 2, 1], [0, 1, 2, 3, 4], [2, 2, 2, 2, 2], [0, 1, 2, 1, 0]]
        return Program(step, lambda index: (torch.randn(5, 6), torch.tensor(labels[index])), (model,))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        report = parity(make, steps=5, backend=backend, captures=1, whole=False)
    assert not report.breaks
    assert {found.code: found.count for found in report.fallbacks} == {"SFX208": 2}


def test_check_of_values_inside_a_loss_of_torch():
    layer = torch.nn.Linear(3, 2)

    def step(x, y, scale):
        made = layer(x)
        loss = torch.nn.functional.gaussian_nll_loss(made[:, :1], y, made[:, 1:].exp() * scale)
        layer.zero_grad()
        loss.backward()
        return loss.detach(), layer.weight.grad.clone()

    captured = sidefx_train.compile(step, backend="eager")
    for i in range(3):
        x, y = torch.randn(4, 3), torch.randn(4, 1)
        for wanted, made in zip(step(x, y, torch.ones(1)), captured(x, y, torch.ones(1)), strict=True):
            assert torch.equal(wanted, made)
    with pytest.raises(ValueError, match="negative"):
        captured(x, y, -torch.ones(1))
    assert len(captured.report().captures) == 1 and not captured.report().breaks


def test_arguments_of_distributions_are_checked_for_any_number_of_rows():
    """Regression: torch has no rule for shapes alone of its test whether all are true."""

    def make():
        policy = mlp()

        def step(x):
            return torch.distributions.Categorical(logits=policy(x), validate_args=True).sample()

        return Program(step, lambda index: (torch.ones(4 + index % 3, 6),), policy)

    parity(make, steps=6, captures=2)


# ---------------------------------------------------------------------- loops that have no other end
def while_finite(x, log):
    while torch.isfinite(x).all():
        x = x * 1e5
        log["again"] += 1


def while_a_number_is_finite(x, log):
    while math.isfinite(x.sum().item()):
        x = x * 1e5
        log["again"] += 1


def while_numpy_says_finite(x, log):
    while np.isfinite(x.sum().item()):
        x = x * 1e5
        log["again"] += 1


def until_not_a_number(x, log):
    """Each value is used twice: what follows the graph backwards must not follow every path."""
    while not math.isnan(x.sum().item()):
        x = x * 1e15 - x * 1e14
        log["again"] += 1


def while_equal_to_itself(x, log):
    while (total := x.sum().item()) == total:
        x = x * 1e15 - x * 1e14
        log["again"] += 1


def recursion(x, log):
    if math.isfinite(x.sum().item()):
        log["again"] += 1
        recursion(x * 1e5, log)


def until_it_raises(x, log):
    try:
        while True:
            math.sqrt(x.sum().item())
            x = x - 3
            log["again"] += 1
    except ValueError:
        log["again"] += 100


def generator(x, log):
    def larger(x):
        while not math.isinf(float(x.sum())):
            x = x * 1e5
            yield x

    log["again"] += sum(1 for _ in larger(x))


ENDLESS = [
    while_finite, while_a_number_is_finite, while_numpy_says_finite, until_not_a_number, while_equal_to_itself,
    recursion, until_it_raises, generator,
]  # fmt: skip


@pytest.mark.parametrize("loop", ENDLESS, ids=lambda loop: loop.__name__)
@pytest.mark.every(2)
def test_the_capture_of_a_loop_has_an_end(loop):
    """The usual side of the only branch that ends a loop is to go on."""

    def make() -> Program:
        weight, log = nn.Parameter(torch.ones(8)), {"again": 0}

        def step(x):
            loop(x.clone(), log)
            loss = (weight * x).sum()
            loss.backward()
            with torch.no_grad():
                weight.sub_(weight.grad * 0.1)
            weight.grad = None
            return loss.detach()

        return Program(step, lambda i: (torch.full((8,), 1.0 + i % 3),), (weight, log))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        report = parity(make, steps=8, whole=False, captures=None)
    assert len(report.captures) <= 2 and not report.fallbacks, f"{report}"


@pytest.mark.parametrize("named", [False, True])
def test_a_test_of_many_parameters_is_assumed_for_each(named):
    """The loop over them ends otherwise, also in a generator."""

    def make() -> Program:
        weights = nn.ParameterList(nn.Parameter(torch.full((2,), float(i))) for i in range(300))

        def step(x):
            loss = sum((weight * x).sum() for weight in weights)
            loss.backward()
            for weight in (each for _, each in weights.named_parameters()) if named else weights:
                if not torch.isfinite(weight.grad).all():
                    return None
                weight.grad = None
            return loss.detach()

        return Program(step, lambda i: (torch.full((2,), float(i)),), weights)

    parity(make, steps=2)
