"""Attributes that a step writes, deletes and creates, reproduced exactly."""

from __future__ import annotations

import dataclasses
import functools
import io
import random
import types

import pytest
import torch
from torch import nn

import sidefx_train
from tests.support.parity import Program, parity
from tests.support.side_effects import Plain, check, program


def test_counter():
    def body(self, loss, x):
        self.calls += 1

    check(body, fields=lambda: {"calls": 0})


@pytest.mark.parametrize("start", [0, 255, 2**40, True, -1])
def test_counter_from_any_start(start):
    def body(self, loss, x):
        self.calls += 1

    check(body, fields=lambda: {"calls": start}, captures=2 if start is True else 1)


def test_counter_never_recaptures():
    """The first call compiles once; calls 2 to 1000 replay."""
    model = nn.Linear(3, 1)
    trainer = Plain()
    trainer.calls, trainer.stats, trainer.history = 0, {"n": 0}, []

    def step(x):
        trainer.calls += 1
        trainer.stats["n"] = trainer.stats["n"] + trainer.calls
        trainer.history.append(trainer.calls)
        return model(x).detach()

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise")
    x = torch.ones(2, 3)
    for _ in range(1000):
        compiled(x)
    report = compiled.report()
    assert (trainer.calls, trainer.stats["n"]) == (1000, 500500), f"{trainer.calls}, {trainer.stats}"
    assert trainer.history == list(range(1, 1001)), "history is not eager's"
    assert (len(report.captures), report.calls, report.fallback_count) == (1, 1000, 0), str(report)
    assert not report.recaptures, str(report)


def test_float_accumulator():
    def body(self, loss, x):
        self.ema = 0.9 * self.ema + 0.1 * self.calls
        self.calls += 1

    check(body, fields=lambda: {"ema": 1.0, "calls": 0})


def test_deleted_attribute():
    def body(self, loss, x):
        self.again = self.temporary + 1
        del self.temporary
        self.kept = 1
        del self.kept

    def make() -> Program:
        return program(body, temporary=1)

    parity(make, between=lambda made, index: setattr(made.watch[2], "temporary", 2), captures=3)


def test_new_attribute():
    def body(self, loss, x):
        if not hasattr(self, "first"):
            self.first = loss.detach()
        self.last = loss.detach()

    check(body, captures=3)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_attribute_holding_a_tensor(backend):
    """An exponential average updated out of place, and one updated in place."""

    def body(self, loss, x):
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.inplace.mul_(0.9).add_(loss.detach())

    check(body, fields=lambda: {"average": torch.zeros(()), "inplace": torch.zeros(())}, backend=backend)


def test_attribute_tensor_alias():
    def body(self, loss, x):
        self.view = self.base[1:]
        self.view.add_(loss.detach())
        self.same = self.base

    check(body, fields=lambda: {"base": torch.zeros(3), "view": None, "same": None}, captures=2)


def test_counter_read_next_step():
    """A Python number written by one step decides the arithmetic of the next."""

    def body(self, loss, x):
        scale = 1.0 / (1 + self.calls)
        self.calls += 1
        return loss.detach() * scale + self.calls

    check(body, fields=lambda: {"calls": 0})


def test_property_and_setattr():
    class Tracked:
        def __init__(self):
            self.log = []
            self._value = 0

        @property
        def value(self):
            return self._value

        @value.setter
        def value(self, new):
            self.log.append(new)
            self._value = new

        def __setattr__(self, name, new):
            object.__setattr__(self, name, new)

    def body(self, loss, x):
        self.tracked.value = self.tracked.value + 1

    check(body, fields=lambda: {"tracked": Tracked()})


def test_dataclass_and_slots():
    @dataclasses.dataclass
    class Metrics:
        steps: int = 0
        loss: object = None

    class Slotted:
        __slots__ = ("n",)

        def __init__(self):
            self.n = 0

    def body(self, loss, x):
        self.metrics.steps += 1
        self.metrics.loss = loss.detach()
        self.slotted.n += 2
        self.made = Metrics(self.metrics.steps, loss.detach())

    check(body, fields=lambda: {"metrics": Metrics(), "slotted": Slotted(), "made": None}, captures=2)


@pytest.mark.parametrize("base", [random.Random, types.SimpleNamespace, functools.partial, bytearray, io.StringIO])
def test_attributes_that_an_object_of_a_class_in_c_gets_later(base):
    """Regression: that an object without a shadow had no such attribute was not guarded."""
    cls = type("Counting", (base,), {"n": 0})

    def make():
        held = cls(print) if base is functools.partial else cls()

        def step(x):
            held.n += 1
            return x * held.n

        def change(index):
            if index == 4:
                held.n = 10
            return (torch.ones(2),)

        return Program(step, change, [])

    parity(make, steps=7, captures=None, whole=False)
