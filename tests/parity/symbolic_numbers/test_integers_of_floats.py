"""Integers of floats that change, used as sizes: the prologue computes them. A graph takes no size from a float."""

from __future__ import annotations

import math
import random

import pytest
import torch

import sidefx_train


class Share:
    value = 1.0


def keeps_columns(x):
    kept = int(x.shape[1] * Share.value)
    return x[:, :kept].sum() * kept


def fills(x):
    made = torch.zeros(math.floor(8 * Share.value))
    made[: round(4 * Share.value)] = x.sum()
    return made


def pastes_a_box(x):
    """As CutMix does."""
    size = int(x.shape[1] * math.sqrt(1 - random.betavariate(1.0, 1.0)))
    center = random.randrange(x.shape[1])
    first, last = max(center - size // 2, 0), min(center + size // 2, x.shape[1])
    x = x.clone()
    x[:, first:last] = x.flip(0)[:, first:last]
    return x * (1 - (last - first) / x.shape[1])


@pytest.mark.parametrize("program", [keeps_columns, fills, pastes_a_box], ids=lambda program: program.__name__)
def test_the_step_is_one_graph(program):
    step = sidefx_train.compile(program, keep_slower=True)
    for number in range(12):
        Share.value = 1 - number / 16
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        outcomes = []
        for function in (program, step):
            random.seed(number)
            outcomes.append((function(x), random.random()))
        (expected, drawn), (found, drawn_too) = outcomes
        torch.testing.assert_close(found, expected)
        assert drawn == drawn_too
    report = step.report()
    assert report.replays == 12 and not report.fallbacks, str(report)
    assert not report.breaks, str(report)
    assert len(report.captures) <= 4


def right(out, target):
    return (out.argmax(1) == target).sum().item()


OF_RESULTS = {
    "int of a half": lambda out, n: out.flatten().topk(int(n * 0.5) + 1)[0].mean(),
    "int of a quotient": lambda out, n: out[int(n / 3)].mean(),
    "floor": lambda out, n: out.mean() * math.floor(n / 3),
    "ceil as a size": lambda out, n: out.mean() + torch.ones(math.ceil(n / 3)).sum(),
    "trunc of a negative number": lambda out, n: out.mean() * math.trunc(-n / 3),
    "round": lambda out, n: out.mean() * round(n / 2),
    "divmod": lambda out, n: out[divmod(n, 5)[1]].mean() * (divmod(n, 5)[0] + 1),
    "divmod of a constant": lambda out, n: out.mean() * sum(divmod(-100, n + 1)),
}


@pytest.mark.parametrize("name", OF_RESULTS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.covering(1)
def test_integers_of_what_the_step_computes(name, backend):
    histories = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(x, target, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            out = model(x)
            loss = OF_RESULTS[name](out, right(out, target))
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = sidefx_train.compile(train, backend=backend, keep_slower=True) if compiled else train
        losses = [step(torch.randn(16, 6), torch.randint(4, (16,))) for _ in range(6)]
        histories.append([*losses, *model.parameters()])
    for want, have in zip(*histories, strict=True):
        torch.testing.assert_close(
            have, want, rtol=0 if backend == "eager" else 1e-5, atol=0 if backend == "eager" else 1e-6
        )
    report = step.report()
    assert len(report.captures) == 1 and not report.breaks and not report.fallbacks, str(report)


def scaling():
    """Returns a layer: what it computes is a number of the graph, and not known before it runs."""
    layer = torch.nn.Linear(3, 3, bias=False)
    torch.nn.init.eye_(layer.weight)
    return layer


def test_the_integer_of_a_float_that_may_be_infinite_is_a_break():
    layer = scaling()

    def program(x):
        return x * int(layer(x).exp().sum().item() * 0.001)

    step = sidefx_train.compile(program, backend="eager", keep_slower=True)
    torch.testing.assert_close(step(torch.ones(3)), program(torch.ones(3)), rtol=0, atol=0)
    with pytest.raises(OverflowError, match="cannot convert float infinity to integer"):
        step(torch.full((3,), 100.0))


def test_the_integer_of_a_float_that_may_be_nan_is_a_break():
    layer = scaling()

    def program(x):
        return x * int(max(min(layer(x).sum().item(), 5.0), 0.0))

    step = sidefx_train.compile(program, backend="eager", keep_slower=True)
    torch.testing.assert_close(step(torch.ones(3)), program(torch.ones(3)), rtol=0, atol=0)
    with pytest.raises(ValueError, match="cannot convert float NaN to integer"):
        step(torch.full((3,), math.nan))
