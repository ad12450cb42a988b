"""Methods that only an object of C, or a function of ``torch.compiler``, refers to: their own object has a shadow."""

from __future__ import annotations

import functools
import operator
import types
from collections import defaultdict

import pytest
import torch
from torch import nn

import sidefx_train
from tests.support.parity import Program, parity


class Counting:
    """Counts its calls: a call by the capture itself would be seen."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(3))
        self.calls: list[int] = []

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(self.calls))
        return (x * self.weight).sum() * len(self.calls)

    def scales(self) -> torch.Tensor:
        self.calls.append(-1)
        return self.weight * len(self.calls)

    def compare(self, first: int, second: int) -> int:
        self.calls.append(first * 10 + second)
        return first - second


def of_torch_compile(counting):
    return torch.compile(counting.scaled, backend="eager")


def of_compiler_disable(counting):
    return torch.compiler.disable(counting.scaled)


def of_lru_cache(counting):
    return functools.lru_cache(None)(counting.scaled)


def of_a_method(counting):
    return types.MethodType(types.MethodType(lambda own, _, x: own.scaled(x), counting), 0)


def of_a_defaultdict(counting):
    made = defaultdict(counting.scales)
    return lambda x: (made[len(counting.calls)] * x).sum()


def of_cmp_to_key(counting):
    key = functools.cmp_to_key(counting.compare)
    return lambda x: counting.scaled(x) * sorted([3, 1, 2], key=key)[0]


def of_a_methodcaller(counting):
    call = operator.methodcaller("scaled", torch.ones(3))
    return lambda x: call(counting) * x.sum()


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize(
    "holder",
    [
        of_torch_compile, of_compiler_disable, of_lru_cache, of_a_method, of_a_defaultdict, of_cmp_to_key,
        of_a_methodcaller,
    ],
)  # fmt: skip
def test_an_object_that_only_a_method_refers_to(holder):
    """Regression: the method's own object was changed while the step was captured, and parameters were not updated."""

    def make() -> Program:
        counting = Counting()
        call = holder(counting)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = call(x)
            loss.backward()
            with torch.no_grad():
                counting.weight -= 0.1 * counting.weight.grad
            return loss.detach()

        return Program(step, lambda i: (torch.arange(3.0) + i,), (counting.weight, counting.calls))

    parity(make, whole=False, captures=None)


def test_what_torch_compile_was_given():
    """Regression: a compiled ``optimizer.step`` trained nothing; a module compiled in place was left to eager."""

    def make(compiles: bool):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        update = optimizer.step
        if compiles:
            net.compile(backend="eager")
            update = torch.compile(update, backend="eager")

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            loss.backward()
            update()
            optimizer.zero_grad()
            return loss.detach()

        return net, step

    net, step = make(False)
    other, given = make(True)
    captured = sidefx_train.compile(given, backend="eager")
    for i in range(4):
        x = torch.full((2, 3), float(i))
        assert torch.equal(captured(x), step(x))
    assert all(map(torch.equal, other.parameters(), net.parameters()))
    assert captured.report().replays == 4
