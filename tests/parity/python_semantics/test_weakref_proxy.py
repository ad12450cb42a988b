"""``weakref.proxy``: an operation on it applies to the object, with the step's changes so far."""

from __future__ import annotations

import abc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import sidefx_train


class Thing(abc.ABC):  # noqa: B024
    def __init__(self) -> None:
        self.scale = 1

    def grow(self, by):
        self.scale += by
        return self.scale

    def __call__(self, by):
        return self.grow(by)

    def __len__(self):
        return self.scale

    def __getitem__(self, index):
        return self.scale + index


def reads(x, thing, proxy, log):
    thing.scale += 1
    log.append((proxy.scale, hasattr(proxy, "fresh"), getattr(proxy, "fresh", 0)))
    return x * proxy.scale


def writes(x, thing, proxy, log):
    proxy.scale = thing.scale + 1
    proxy.fresh = 3
    log.append((thing.scale, thing.fresh))
    del proxy.fresh
    log.append(hasattr(thing, "fresh"))
    return x * thing.scale


def calls(x, thing, proxy, log):
    log.append((proxy.grow(2), proxy(3)))
    return x * thing.scale


def classes(x, thing, proxy, log):
    log.append((isinstance(proxy, Thing), type(proxy) is Thing, proxy.__class__ is Thing, isinstance(proxy, nn.Module)))
    return x


def made_of_one_from_outside(x, thing, proxy, log):
    made = weakref.proxy(thing)
    made.scale += 1
    log.append((thing.scale, made.scale, proxy.scale))
    return x * made.scale


def made_of_one_of_its_own(x, thing, proxy, log):
    own = Thing()
    made = weakref.proxy(own)
    made.scale += thing.scale
    log.append((own.scale, made.scale))
    del own
    try:
        made.scale  # noqa: B018
    except ReferenceError as error:
        log.append(str(error))
    return x


WHOLE = [reads, writes, calls, classes, made_of_one_from_outside, made_of_one_of_its_own]


def operators(x, thing, proxy, log):
    thing.scale += 1
    log.append((proxy[1], len(proxy), bool(proxy), proxy == proxy))
    return x * proxy.scale


def _run(program, compiled):
    thing, other, log = Thing(), Thing(), []
    held = {"thing": thing, "proxy": weakref.proxy(thing)}

    def step(x):
        return program(x, held["thing"], held["proxy"], log)

    run = sidefx_train.compile(step, backend="aot_eager") if compiled else step
    seen: list[Any] = []
    for call in range(6):
        if call == 2:
            thing.scale = 10
        if call == 4:  # a new object, and its proxy
            held |= {"thing": other, "proxy": weakref.proxy(other)}
        seen.append(run(torch.ones(2)).tolist())
        seen.append((thing.scale, other.scale))
    if compiled and program in WHOLE:
        assert run.report().replays == 6
    return seen, log


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize("program", [*WHOLE, operators])
def test_a_proxy_is_the_object(program):
    assert _run(program, compiled=True) == _run(program, compiled=False)


def test_a_dead_one():
    """A captured part must not keep the object alive only because of the proxy."""
    held = {"thing": Thing()}
    proxy = weakref.proxy(held["thing"])

    def step(x):
        try:
            return x * proxy.scale
        except ReferenceError as error:
            held["error"] = str(error)
            return x

    held.clear()
    run = sidefx_train.compile(step, backend="aot_eager")
    assert run(torch.ones(2)).tolist() == [1, 1]
    assert held["error"] == "weakly-referenced object no longer exists"


def test_a_module_behind_one():
    """Lightning's loops and trainers refer to each other this way."""

    def run(compiled):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        model.calls = 0
        proxy = weakref.proxy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            model.calls += 1
            loss = proxy(x).sum() * proxy.calls
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = sidefx_train.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
        losses = [step(torch.full((2, 3), float(n))) for n in range(4)]
        return [*losses, *model.parameters(), torch.tensor(model.calls)]

    for ours, eager in zip(run(compiled=True), run(compiled=False), strict=True):
        assert torch.equal(ours, eager)
