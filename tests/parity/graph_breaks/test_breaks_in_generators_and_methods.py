"""Breaks inside generators, context managers made by them, and methods of modules."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from tests.support.graph_breaks import failing, in_parts, natively, outside, trained
from tests.support.parity import Program, batches, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


def test_break_inside_a_generator():
    def after(loss, log, state):
        def values():
            for i in range(2):
                yield outside(loss) + i

        for value in values():
            log.append(value)
        return loss

    in_parts(trained(after))


def test_break_between_the_items_of_a_generator():
    def after(loss, log, state):
        def values(scale):
            count = 0
            try:
                while count < 3:
                    got = yield loss * scale + count
                    log.append(("got", got))
                    count += 1
            finally:
                log.append(("left", count))

        items = values(2)
        for item in items:
            log.append(outside(item))
        more = values(3)
        log.append(next(more))
        log.append(outside(loss))
        log.append(more.send("x"))
        more.close()
        return list(values(outside(loss)))

    in_parts(trained(after))


def test_break_inside_a_context_manager_made_by_a_generator():
    @contextlib.contextmanager
    def scaled(state, log, by):
        state["scale"] = state.get("scale", 1.0) * by
        log.append(("enter", state["scale"]))
        try:
            with torch.no_grad():
                yield state["scale"]
        except ValueError as error:
            log.append(str(error))
        finally:
            state["scale"] /= by
            log.append(("leave", state["scale"]))

    def after(loss, log, state):
        with scaled(state, log, 2.0) as outer, scaled(state, log, 4.0):
            log.append(outside(loss) * outer)
            y = loss * state["scale"]
        log.append(y.requires_grad)
        return y

    def swallowed(loss, log, state):
        with scaled(state, log, 2.0):
            failing(loss)
        return loss

    in_parts(trained(after))
    parity(trained(swallowed), whole=False, captures=None)


def test_a_module_with_a_break_in_forward_without_grad():
    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 3)
            self.seen = []

        def forward(self, x):
            y = self.inner(x)
            self.seen.append(outside(y.sum()))
            return y.relu()

    def make():
        model = Probe()

        def step(x, y):
            with torch.no_grad():
                return model(x).sum()

        return Program(step, batches((5, 6), classes=3), (model,))

    in_parts(make)


def test_a_break_in_a_method_that_calls_super():
    class Noting(nn.Linear):
        def forward(self, x):
            self.seen = [*self.seen, outside(x.sum())]
            y = super().forward(x)
            self.seen.append(outside(y.sum()))
            return super().forward(y)

    def make():
        model = Noting(6, 6)
        model.seen = []

        def step(x, y):
            with torch.no_grad():
                return model(x).sum()

        return Program(step, batches((5, 6), classes=3), (model,))

    in_parts(make)


def test_a_break_inside_a_generator_that_another_delegates_to():
    def inner(log):
        try:
            log.append((yield 1))
            log.append(natively(2))
            return (yield 3)
        finally:
            log.append("left")

    def outer(log):
        log.append((yield from inner(log)))
        yield 9

    def make() -> Program:
        log: list[object] = []

        def step(x):
            held = outer(log)
            next(held)
            x = x * held.send(4)
            natively(1)
            for value in held:
                x = x + value
                natively(value)
            return x

        return Program(step, lambda index: (torch.ones(2),), (log,))

    report = parity(make, steps=3, captures=None, whole=False)
    assert report.replays == report.calls and not report.fallbacks, report
