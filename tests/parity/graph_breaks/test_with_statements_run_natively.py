"""Breaks inside contexts that cannot be kept between two parts: only the ``with`` statement runs natively."""

from __future__ import annotations

import contextlib
import io
import threading

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity

import sidefx_train
from tests.support.graph_breaks import failing, outside, trained
from tests.support.parity import Program, batches, mlp, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


class Holding:
    """A context with an object that no code can make again."""

    def __init__(self, log, swallows=False):
        self.log, self.swallows = log, swallows
        self.lock = threading.Lock()

    def __enter__(self):
        self.log.append(("enter", self.lock.acquire()))
        return self

    def __exit__(self, kind, value, trace):
        self.lock.release()
        self.log.append(("leave", None if kind is None else kind.__name__))
        return self.swallows


def assigns(loss, log, state):
    with Holding(log) as held:
        scaled = loss * 2
        value = outside(scaled)
        state["value"], (first, *rest) = value, [scaled + 1, scaled]
    return first * value + rest[0], held.lock.locked()


def swallows(loss, log, state):
    with Holding(log, swallows=True):
        value = failing(loss)
        log.append(value)
    log.append("after")
    return loss * 2


def leaves_a_variable_unbound(loss, log, state):
    with Holding(log, swallows=True):
        value = failing(loss)
    try:
        log.append(value)
    except UnboundLocalError as error:
        log.append(type(error).__name__)
    return loss * 2


def may_leave_a_variable_unbound(loss, log, state):
    with Holding(log):
        if outside(loss) > 1e6:
            value = 1
    try:
        return loss * value
    except UnboundLocalError:
        return loss * 3


def raises(loss, log, state):
    try:
        with Holding(log):
            failing(loss)
    except ValueError as error:
        log.append(str(error))
    finally:
        log.append("finally")
    return loss * 2


def returns(loss, log, state):
    with Holding(log):
        return loss * outside(loss)


def returns_sometimes(loss, log, state):
    with Holding(log):
        if outside(loss) > 0 and state["calls"] % 2:
            return loss
        doubled = loss * 2
    return doubled + 1


def loops(loss, log, state):
    for number in range(5):
        with Holding(log):
            loss = loss + outside(loss)
            if number == 1:
                continue
            if number == 3:
                break
        loss = loss * 2
    return loss, number


def nests(loss, log, state):
    with Holding(log), torch.no_grad(), Holding(log):
        loss = loss * outside(loss)
        log.append(torch.is_grad_enabled())
    return loss * 2


def tries_inside(loss, log, state):
    with Holding(log):
        try:
            value = failing(loss)
        except ValueError:
            value = 2.0
        finally:
            doubled = loss * 2
    return doubled * value


def closes_over(loss, log, state):
    def shown():
        return value, log[-1]

    with Holding(log):
        value = outside(loss)
    return loss * value, shown()


def in_a_callee(loss, log, state):
    def inner(loss):
        with Holding(log):
            value = outside(loss)
        return loss * value

    return inner(inner(loss) + 1) * 2


def in_a_comprehension(loss, log, state):
    with Holding(log):
        value = sum(item * outside(loss) for item in [item for item in range(3)])
    return loss * value, [item for item in range(2)]


def twice(loss, log, state):
    with Holding(log):
        loss = loss * outside(loss)
    log.append("between")
    loss = loss * 2
    with Holding(log):
        loss = loss + outside(loss)
    return loss * 2


PROGRAMS = [
    assigns, swallows, leaves_a_variable_unbound, raises, returns, returns_sometimes, loops, nests, tries_inside,
    closes_over, in_a_callee, in_a_comprehension, twice,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.every(2)
def test_control_flow(program):
    report = parity(trained(program), whole=False, captures=None)
    assert report.breaks and not report.fallbacks, report


def test_a_variable_that_may_be_unbound_is_left_alone():
    parity(trained(may_leave_a_variable_unbound), whole=False, captures=None)


CONTEXTS = {
    "inference mode": torch.inference_mode,
    "errors of numpy": lambda: np.errstate(divide="raise"),
    "random state": torch.random.fork_rng,
    "profiler": lambda: torch.profiler.profile(activities=[ProfilerActivity.CPU]),
    "profiler of autograd": torch.autograd.profiler.profile,
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "no hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "duals": torch.autograd.forward_ad.dual_level,
    "closing": lambda: contextlib.closing(io.StringIO()),
    "lock": threading.Lock,
    "stack": contextlib.ExitStack,
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.every(2)
def test_a_context(name):
    def make() -> Program:
        model, log = mlp(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            with CONTEXTS[name]():
                logits = model(x)
                log.append(outside(logits.detach().sum()))
                noise = torch.rand(logits.shape)
            log.append((torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(), np.geterr()["divide"]))
            loss = torch.nn.functional.cross_entropy(model(x) + (noise if noise.is_inference() else logits), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach() * 2

        return Program(step, batches((5, 6), classes=3), (model, optimizer, log))

    report = parity(make, whole=False, captures=None)
    assert report.breaks and not report.fallbacks
    assert report.parts and not any(part.fallbacks for part in report.parts)


def test_hooks_on_saved_tensors_run_as_often_as_in_eager():
    def make() -> Program:
        model, log = mlp(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def pack(tensor):
            log.append("pack")
            return tensor * 1

        def unpack(tensor):
            log.append("unpack")
            return tensor

        def step(x, y):
            log.append("begins")
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                logits = model(x)
                log.append(outside(logits.detach().sum()))
                loss = torch.nn.functional.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach() * 2

        return Program(step, batches((5, 6), classes=3), (model, optimizer, log))

    report = parity(make, whole=False, captures=None)
    assert report.breaks and not report.fallbacks


def test_the_report_says_so():
    def step(x):
        y = x * 2
        with Holding([]):
            value = outside(y.sum())
        return y * value

    captured = sidefx_train.compile(step, backend="eager")
    captured(torch.ones(2))
    assert [each.reason for each in captured.report().breaks if "the with statement around it" in each.reason]
