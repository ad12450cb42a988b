"""Text that a step prints, in order and as of the line that printed it."""

from __future__ import annotations

import collections
import types

import numpy as np
import pytest
import torch

import sidefx_train
from tests.support.parity import Program, parity
from tests.support.side_effects import check


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_print_in_order(backend):
    def body(self, loss, x):
        print("call", self.calls)
        self.calls += 1
        print("rows", x.shape[0], sep="=", end=";\n")
        print(f"still {self.calls}")

    check(body, fields=lambda: {"calls": 0}, backend=backend)


def test_print_of_tensors():
    def body(self, loss, x):
        print("loss", loss.detach())
        print(x.sum())

    check(body)


def test_print_of_an_object_the_step_has_changed():
    """The printed text shows the object with the step's changes before the print."""

    class Meter:
        def __init__(self):
            self.n = 0

        def __repr__(self):
            return f"Meter({self.n})"

    def body(self, loss, x):
        self.meter.n += x.shape[0]
        print(self.meter, "after", self.calls)
        self.calls += 1

    check(body, fields=lambda: {"meter": Meter(), "calls": 0})


@pytest.mark.parametrize("shown", ["{:.3f}", "%.3f"])
def test_numbers_of_tensors_whose_graphs_are_alive(shown):
    """Only the number leaves the step, not the history: the step is one graph, and may assume a condition."""

    def make() -> Program:
        model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        lines = []

        def step(x):
            h = model(x)
            assert (h > -100).all(), "too small"
            loss, value = h.square().mean(), other(x).square().mean()
            model.zero_grad()
            loss.backward(retain_graph=True)
            lines.append(f"{loss:.3f} of {value}" if shown == "{:.3f}" else "%.3f of %5.2f" % (loss, value))
            print(lines[-1])

        return Program(step, lambda call: (torch.randn(3, 4),), [model, other, lines])

    parity(make)


@pytest.mark.parametrize("text", ["%s", "%r and %.2f", "%(loss)s", "%5s"])
def test_other_conversions_show_the_history(text):
    def step(x):
        loss = (x * 2).sum()
        return text % ({"loss": loss} if "(" in text else (loss, loss)[: text.count("%")])

    made = sidefx_train.compile(step, backend="eager")
    assert all("6., grad_fn=" in made(torch.ones(3, requires_grad=True)) for _ in range(2))


def an_array():
    array = np.zeros(3)
    print(array, [array])
    array[0] = 1
    print(array[:2])
    array += 1


def a_bytearray():
    data = bytearray(b"abc")
    print(data)
    data.append(7)
    return data


def a_namespace():
    space = types.SimpleNamespace(a=[1])
    print(space)
    space.a.append(2)
    space.b = 3


def views_of_dicts():
    for table in ({"a": [1]}, collections.OrderedDict(a=[1])):
        print(table.keys(), table.values(), table.items())
        table["a"].append(2)
        table["b"] = 3


def an_optimizer():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    print(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    print(optimizer, [optimizer])


CHANGED = [an_array, a_bytearray, a_namespace, views_of_dicts, an_optimizer]


@pytest.mark.parametrize("change", CHANGED, ids=lambda change: change.__name__)
def test_what_the_step_changes_after_the_print(change):
    def make():
        return Program(step=lambda x: (change(), x + 1), batch=lambda call: (torch.ones(2) * call,))

    parity(make, steps=3)


def test_the_learning_rate_before_the_scheduler_changes_it():
    def make():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def step(x):
            model(x).sum().backward()
            optimizer.step()
            print(optimizer)
            scheduler.step()

        return Program(step, batch=lambda call: (torch.ones(2) * call,), watch=(model, optimizer))

    parity(make, steps=4, captures=2)
