"""``pickle.dumps`` of plain values, with which libraries make keys of their caches."""

from __future__ import annotations

import functools
import pickle

import pytest
import torch

import sidefx_train


def cached(method):
    """Keeps results by arguments, as the decorator of gpytorch does."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        key = method.__qualname__, args, pickle.dumps(kwargs)
        if key not in self.cache:
            self.cache[key] = method(self, *args, **kwargs)
        return self.cache[key]

    return run


class Kernel:
    def __init__(self, weight):
        self.weight, self.cache, self.calls = weight, {}, 0

    @cached
    def scaled(self, factor, *, negative=False, name=None):
        self.calls += 1
        return self.weight.sin() * (-factor if negative else factor)


def test_a_cache_with_pickled_keys_is_captured():
    def make():
        weight = torch.nn.Parameter(torch.ones(3))

        def step(x):
            kernel = Kernel(weight * x)
            loss = kernel.scaled(2) + kernel.scaled(2) + kernel.scaled(2, negative=True, name="a")
            loss.sum().backward()
            gradient, weight.grad = weight.grad, None
            return gradient, kernel.calls, sorted(kernel.cache)

        return step

    step, compiled = make(), sidefx_train.compile(make(), backend="eager", fullgraph=True, on_failure="raise")
    for i in range(3):
        assert repr(compiled(torch.full((3,), i + 1.0))) == repr(step(torch.full((3,), i + 1.0)))
    assert len(compiled.report().captures) == 1 and compiled.report().replays == 3


class Own:
    def __reduce__(self):
        STORE.reduced += 1
        return Own, ()


class Store:
    reduced = 0


STORE = Store()


@pytest.mark.parametrize("value", [Own, lambda: [Own()], lambda: {"a": STORE.number}], ids=["object", "list", "number"])
def test_other_values_are_those_of_eager(value):
    def step(x):
        return x + len(pickle.dumps(value())), pickle.dumps(value())

    compiled = sidefx_train.compile(step, backend="eager")
    found = []
    for run in (step, compiled):
        STORE.reduced = 0
        found.append([])
        for STORE.number in range(6):
            found[-1].append((repr(run(torch.ones(2))), STORE.reduced))
    assert found[0] == found[1]
