"""Modules whose classes have attribute hooks that call those of ``nn.Module``."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torchmetrics
from torch import nn

import sidefx_train


class Wrapper(nn.Module):
    """Passes on what it does not have to the module that it contains, as adapters do."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.base.config = {"scale": 2}
        self.calls, self.kept, self.last, self.errors = 0, [], None, {}

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name == "base":
                raise
            self.errors[name] = str(error), error.name
            return getattr(self.base, name)

    def __setattr__(self, name, value):
        if name == "locked":
            raise ValueError(name)
        super().__setattr__(name, value)

    def forward(self, x):
        self.calls += 1
        self.kept.append(self.calls)
        self.last = x * 2
        self.tag = f"call {self.calls}"
        return self.base(x) * self.config["scale"] + self.weight.sum(), hasattr(self, "absent")


class Members(Wrapper):
    """Sets what ``nn.Module`` stores elsewhere, and a property."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self._rate = 1.0

    @property
    def rate(self):
        return self._rate

    @rate.setter
    def rate(self, value):
        self._rate = value

    def forward(self, x):
        self.count = self.count + 1
        self.rate = self.rate / 2
        self.extra = nn.Identity()
        with contextlib.suppress(ValueError):
            self.locked = True
        return super().forward(x)


@pytest.mark.parametrize("make", [Wrapper, Members])
def test_what_they_leave_is_eagers(make):
    torch.manual_seed(0)
    one, other = make(), make()
    other.load_state_dict(one.state_dict())
    step = sidefx_train.compile(lambda x: one(x), backend="eager")
    for _ in range(5):
        x = torch.randn(4, 3)
        found, expected = step(x), other(x)
        assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
        assert list(vars(one)) == list(vars(other)) and list(one._modules) == list(other._modules)
        plain = "calls", "kept", "errors", "tag", "_rate"
        assert all(vars(one).get(name) == vars(other).get(name) for name in plain)
        assert torch.equal(one.last, other.last)
        for name, value in other.state_dict().items():
            assert torch.equal(one.state_dict()[name], value), name
    report = step.report()
    assert report.replays == 5 and not report.breaks and not report.fallbacks
    if make is Wrapper:  # a new submodule at every call is another object at every call
        assert len(report.captures) == 1


def test_a_metric_is_captured_once():
    metric = torchmetrics.Accuracy("multiclass", num_classes=3)
    expected = torchmetrics.Accuracy("multiclass", num_classes=3)
    step = sidefx_train.compile(lambda x, y: metric(x, y), backend="eager", fullgraph=True)
    for _ in range(4):
        batch = torch.randn(4, 3), torch.randint(0, 3, (4,))
        assert torch.equal(step(*batch), expected(*batch))
    assert torch.equal(metric.compute(), expected.compute())
    assert len(step.report().captures) == 1


class Answering(nn.Module):
    """Answers for some of its attributes itself, before any lookup."""

    def __init__(self):
        super().__init__()
        self.weight, self.gain, self.log = nn.Parameter(torch.ones(3)), 2.0, []

    def __getattribute__(self, name):
        if name == "gain":
            object.__getattribute__(self, "log").append(name)
            return 9.0
        return super().__getattribute__(name)

    def forward(self, x):
        return x * self.weight * self.gain


def test_every_load_goes_through_getattribute():
    module = Answering()
    step = sidefx_train.compile(lambda x: module(x), backend="eager", fullgraph=True)
    for call in range(3):
        assert step(torch.ones(3)).tolist() == [9.0, 9.0, 9.0]
        assert module.log == ["gain"] * (call + 1)
    assert len(step.report().captures) == 1


@pytest.mark.parametrize("of_base", [False, True])
def test_getattribute_that_a_class_gets_later(of_base):
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = 2.0

        def forward(self, x):
            return x * self.gain

    class Derived(Base): ...

    module = Derived()
    step = sidefx_train.compile(lambda x: module(x), backend="eager", fullgraph=True)
    assert [step(torch.ones(())).item() for _ in range(2)] == [2.0, 2.0]
    changed = Base if of_base else Derived
    changed.__getattribute__ = lambda self, name: 7.0 if name == "gain" else object.__getattribute__(self, name)
    assert [step(torch.ones(())).item() for _ in range(2)] == [7.0, 7.0]


def test_zero_grad_asks_the_hook_of_the_class():
    class Asked(nn.Linear):
        def __getattr__(self, name):
            asked.append(name)
            return super().__getattr__(name)

    asked: list[str] = []
    module = Asked(3, 3)

    def program(x):
        module.zero_grad()
        module(x).sum().backward()

    asked.clear()
    program(torch.ones(2, 3))
    expected = list(asked)
    step = sidefx_train.compile(program, backend="eager", fullgraph=True)
    for _ in range(3):
        asked.clear()
        step(torch.ones(2, 3))
        assert asked == expected
