"""Clocks that a step reads: before its first tensor operation in the prologue, behind the last in the native rest.

And identifiers, which differ at every call as well.
"""

from __future__ import annotations

import random
import secrets
import time
import uuid
from datetime import datetime, timedelta, timezone

import pytest
import torch
from torch import nn

import sidefx_train

CLOCKS = [time.time, time.perf_counter, time.monotonic, time.process_time, time.thread_time]
CLOCKS += [time.time_ns, time.perf_counter_ns, time.monotonic_ns, time.process_time_ns, datetime.now]


class Meter:
    """Keeps what it is given, and its mean."""

    def __init__(self):
        self.values, self.sum, self.count = [], 0.0, 0

    def update(self, value, n=1):
        self.values.append(value)
        self.sum += value * n
        self.count += n


def trained(body):
    """Compiles a step that trains a layer in ``body(train, x)``."""
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def train(x):
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    train.optimizer = optimizer
    return sidefx_train.compile(lambda x: body(train, x), backend="eager", fullgraph=True, on_failure="raise")


@pytest.mark.parametrize("clock", CLOCKS, ids=lambda clock: clock.__qualname__)
def test_the_time_of_a_step(clock):
    def body(train, x):
        body.calls += 1
        train.optimizer.zero_grad()
        begin = clock()
        loss = train(x)
        end = clock()
        return {"loss": loss, "list": [loss, begin], "begin": begin, "end": end, "taken": clock() - begin}

    body.calls = 0
    step = trained(body)
    last = clock()
    for _ in range(6):
        before = clock()
        found = step(torch.randn(4, 3))
        begin, end, taken = found["begin"], found["end"], found["taken"]
        assert found["loss"].requires_grad and found["list"] == [found["loss"], begin]
        assert last <= before <= begin <= end <= clock() and taken >= end - begin
        assert type(begin) is type(before) and type(taken) is type(before - before)
        last = end
    assert len(step.report().captures) == 1 and step.report().replays == 6


def test_the_time_between_two_steps():
    """Each call reads how long the one before it is over, and keeps an average, as a progress meter does."""
    data, batch = Meter(), Meter()
    end = time.time()

    def body(train, x):
        nonlocal end
        data.update(time.time() - end)
        train(x)
        batch.update(time.time() - end, len(x))
        end = time.time()

    step = trained(body)
    for index in range(6):
        began = time.time()
        step(torch.randn(4, 3))
        assert 0 <= data.values[-1] <= batch.values[-1] and began <= end <= time.time()
        assert data.count == index + 1 and batch.count == 4 * index + 4
        time.sleep(0.01)
    assert min(data.values[1:]) >= 0.01 and data.sum == sum(data.values)
    assert len(step.report().captures) <= 2 and step.report().replays == 6


def test_a_date_with_a_zone_is_left_behind():
    seen = []

    def body(train, x):
        seen.append(datetime.now(timezone.utc))
        return train(x).item()

    step = trained(body)
    for _ in range(4):
        step(torch.randn(4, 3))
    assert all(each.tzinfo is timezone.utc for each in seen) and seen == sorted(seen) and len({*seen}) == 4
    assert datetime.now(timezone.utc) - seen[0] < timedelta(hours=1)


def test_a_clock_inside_the_step_is_a_break():
    """The phases of a step are measured: its graph is not moved past a clock."""

    def step(x):
        x = x @ x
        between = time.perf_counter()
        return x.sum(), between

    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    for _ in range(3):
        before = time.perf_counter()
        total, between = compiled(torch.ones(2, 2))
        assert before <= between <= time.perf_counter() and total == 8
    assert {found.code for found in compiled.report().breaks} == {"SFX103"}


def test_a_decision_on_a_clock():
    """Something is shown when enough time has passed."""
    shown, last, pause = [], time.monotonic(), 0.0

    def step(x):
        nonlocal last
        if time.monotonic() - last > pause:
            shown.append(x.sum())
            last = time.monotonic()
        return x * 2

    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    for index in range(8):
        count, pause = len(shown), -1.0 if index % 2 else 1e9
        assert compiled(torch.ones(2)).sum() == 4
        assert len(shown) == count + index % 2
    assert not compiled.report().fallbacks and len(compiled.report().captures) == 2


def test_a_clock_and_a_generator_are_taken_back():
    """Guards fail behind the draws: the generator gets back its state, although the time has seeded it."""
    kept = {"shift": 1}

    def step(x):
        now = time.time_ns()
        random.seed(now % 1000)
        first = random.random()
        return x + kept["shift"], first, now

    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    for shift in (1, 1, torch.ones(2), 1.5, 2.5, 1, 1):
        kept["shift"] = shift
        _, first, now = compiled(torch.ones(2))
        assert first == random.Random(now % 1000).random()
    assert not compiled.report().fallbacks


@pytest.mark.parametrize(
    "make", [uuid.uuid4, uuid.uuid1, secrets.token_hex, secrets.token_bytes], ids=lambda f: f.__name__
)
def test_an_identifier_is_one_break(make):
    seen = []

    def step(x):
        name = make()
        y = x * 2
        seen.append(str(name))
        return y.sum(), name

    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    for index in range(8):
        total, name = compiled(torch.full((2,), float(index)))
        assert total == 4 * index and type(name) is type(make()) and seen[-1] == str(name)
    report = compiled.report()
    assert len({*seen}) == 8 and not report.fallbacks, str(report)
    assert len(report.breaks) == 1 and all(len(part.captures) <= 3 for part in report.parts), str(report)
