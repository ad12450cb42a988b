"""Sizes that are computed from data, such as ``int(lengths.max())``: one graph, and eager's errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten

import sidefx_train


def mask(x, n):
    seen = torch.arange(n) < torch.tensor([1, 2, 3, 4])[:, None]
    return x[:, :n] * seen, n, n / 2


def factories(x, n):
    return torch.zeros(n, 2), torch.ones(n).cumsum(0) / n, torch.full((n,), n), torch.arange(n - 3, n + 1)


def arithmetic(x, n):
    return torch.zeros(max(n, 6)), torch.zeros(n // 2 * 2 + 1, 3) + n % 3, x[:, :n] * n + n / 2


def views(x, n):
    return x.repeat(1, n).view(4, n, 9).sum(1), x.roll(n, 1), F.pad(x, (0, n)) * 2


def gradients(x, n):
    x = x.clone().requires_grad_()
    (F.pad(x, (0, n)).square() * torch.arange(9 + n)).sum().backward()
    return x.grad, x.detach().topk(n).values


STEPS = [mask, factories, arithmetic, views, gradients]


def outcome(step, x, lengths):
    try:
        return [value if type(value) in (int, float) else value.detach().clone() for value in step(x, lengths)]
    except Exception as error:
        return type(error)


def check(step, backend, sizes, exact):
    captured, replays = sidefx_train.compile(step, backend=backend), 0
    for seed, size in enumerate(sizes):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed))
        wanted, made = outcome(step, x, torch.tensor([-30, size])), outcome(captured, x, torch.tensor([-30, size]))
        if isinstance(wanted, type):
            assert made is wanted, size
            continue
        replays += 1
        assert len(wanted) == len(made)
        for one, other in zip(wanted, made, strict=True):
            assert type(one) is type(other)
            torch.testing.assert_close(other, one, **({"rtol": 0, "atol": 0} if exact else {}))
    report = captured.report()
    assert not report.breaks and len(report.captures) == 1
    return report, replays


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_operation_by_operation(step):
    report, replays = check(lambda x, lengths: step(x, int(lengths.max())), "eager", (4, 6, 5, 7, 4), exact=True)
    assert report.replays == replays == 5


@pytest.mark.parametrize("steps", [STEPS[:2], STEPS[2:]], ids=lambda steps: steps[0].__name__)
@pytest.mark.every(2)
def test_lowered(steps):
    def step(x, lengths):
        n = int(lengths.max())
        return tree_flatten([each(x, n) for each in steps])[0]

    report, replays = check(step, "inductor", (4, 6, 5, 7, 4), exact=False)
    assert report.replays == replays == 5


def narrowed(x, lengths):
    return (x.narrow(1, 0, int(lengths.max())) * 2,)


def counted(x, lengths):
    return (torch.arange(int(lengths.max())).sum(),)


def viewed(x, lengths):
    return (x.view(int(lengths.max()), -1).sum(1),)


def added(x, lengths):
    n, m = int(lengths.max()), int(lengths.min()) + 34
    return (x[0, :n] + x[1, :m],)


def multiplied(x, lengths):
    """The size is fixed by the other matrix."""
    return (x[:, : int(lengths.max())] @ torch.ones(4, 3),)


@pytest.mark.parametrize(
    "step, backend",
    [
        *((step, "eager") for step in (narrowed, counted, viewed, added, multiplied)),
        *((step, "inductor") for step in (narrowed, counted)),
        *(pytest.param(step, "inductor", marks=pytest.mark.slow) for step in (viewed, added)),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_sizes_that_eager_refuses(step, backend):
    """Regression: ``narrow`` gave fewer elements, and Inductor's ``arange`` none."""
    captured = sidefx_train.compile(step, backend=backend)
    for size in (4, 6, 9, 12, 0, 1, -1, -20, 4):
        x = torch.arange(36.0).view(4, 9)
        wanted, made = outcome(step, x, torch.tensor([-30, size])), outcome(captured, x, torch.tensor([-30, size]))
        assert str(wanted) == str(made), size
    assert captured.report().replays > 0


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_update_before_an_error_happens_once(backend):
    """The size is refused after the optimizer's update: eager keeps that, and so does the eager run of the step."""
    results = []
    for compiled in (False, True):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], 0.1)

        def step(x, lengths, weight=weight, optimizer=optimizer):
            (weight * x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return (torch.arange(int(lengths.max())).sum() + weight.detach().sum(),)

        run = sidefx_train.compile(step, backend=backend) if compiled else step
        for size in (3, 4, -1, 2, -5, 3):
            results.append([outcome(run, torch.ones(4) * 0.5, torch.tensor([-30, size])), weight.tolist()])
    assert run.report().replays == 4
    for eager, captured in zip(results[:6], results[6:], strict=True):
        assert isinstance(eager[0], type) == isinstance(captured[0], type)
        torch.testing.assert_close(torch.tensor(captured[1]), torch.tensor(eager[1]))


def _joined_by_data(x, first, second):
    return torch.cat([x[first.nonzero().squeeze(1)], x[second.nonzero().squeeze(1)]])


def _joined_inputs(x, first, second):
    return torch.cat([x[: len(first)], second])


SUMS_OF_SIZES = {"by data": _joined_by_data, "of inputs": _joined_inputs}


@pytest.mark.parametrize("joined", ["by data", pytest.param("of inputs", marks=pytest.mark.slow)])
@pytest.mark.parametrize("partition", ["min_cut", pytest.param("default", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_backward_outside_over_the_sum_of_two_sizes(joined, partition):
    """The backward's inputs have ``u0 + u1`` rows, and none has ``u0``: the two are inputs of their own."""
    net = torch.nn.Linear(4, 20)

    def loss_of(x, first, second):
        rows = SUMS_OF_SIZES[joined](x, first, second)
        return net(rows).reshape(rows.shape[0], -1, 4).square().mean()

    compiled = sidefx_train.compile(loss_of, backend="inductor", warmup="now", keep_slower=True, partition=partition)
    for i in range(4):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(9 + i, 4, generator=generator)
        first = torch.rand(9 + i, generator=generator) > 0.5
        second = torch.rand(9 + i, generator=generator) > 0.3
        if joined == "of inputs":
            first, second = first[: 5 + i], torch.randn(3 + 2 * i, 4, generator=generator)
        grads = []
        for call in (loss_of, compiled):
            net.zero_grad()
            call(x, first, second).backward()
            grads.append(net.weight.grad.clone())
        torch.testing.assert_close(*grads)
    report = compiled.report()
    assert report.fallback_count == 0 and not report.fallbacks, report
    assert len(report.captures) <= 2, report
