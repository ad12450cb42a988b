"""Arrays and lists that a step makes, keeps or gets, and shuffles or samples from: drawn before the graph."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import sidefx_train
from tests.support.parity import Program, parity

ROWS, WIDTH = 8, 4


class Net:
    def __init__(self) -> None:
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.01)
        self.kept: list = []
        self.order = list(range(ROWS))
        self.numpy = np.random.default_rng(3)

    def __call__(self, x):
        return self.layer(x)


def minibatches(net, x):
    rows = np.arange(ROWS)
    for _ in range(2):
        np.random.shuffle(rows)
        for start in range(0, ROWS, 4):
            yield net(x[rows[start : start + 4]]).square()


def by_a_generator(net, x):
    rows = np.arange(ROWS)
    net.numpy.shuffle(rows)
    yield net(x[rows]).square().cumsum(0)


def views(net, x):
    rows = np.arange(ROWS)
    first, both = rows[:4], rows.reshape(2, 4)
    np.random.shuffle(rows)
    yield net(x[first] - x[rows[4:]]).square().cumsum(0) + net(x[both[1]])


def tensors_before_and_after(net, x):
    rows = np.arange(ROWS)
    before = torch.tensor(rows)
    np.random.shuffle(rows)
    between = torch.tensor(rows)
    np.random.shuffle(rows)
    yield (net(x[before]) * net(x[between]) * net(x[torch.as_tensor(rows)])).cumsum(0)


def kept(net, x):
    rows, weights = np.arange(ROWS), np.linspace(0.0, 1.0, 3)
    np.random.shuffle(rows)
    np.random.shuffle(weights)
    net.kept += [rows, rows[2:5], weights]
    yield net(x[rows]).square().cumsum(0)


def made_in_a_loop(net, x):
    for size in (8, 6, 4):
        rows = np.arange(size)
        np.random.shuffle(rows)
        yield from (net(x[rows[start : start + 2]]).square() * (1 + start) for start in range(0, size, 2))


def made_of_parts(net, x):
    labels = np.concatenate([np.zeros(4), np.ones(4)])
    np.random.shuffle(labels)
    yield (net(x) * torch.from_numpy(labels).float()[:, None]).square().cumsum(0)


def written_between(net, x):
    rows = np.arange(ROWS)
    np.random.shuffle(rows)
    rows[0], rows[1] = rows[1], rows[0]
    rows += 1
    np.random.shuffle(rows)
    yield net(x[rows % ROWS]).square().cumsum(0)


def a_matrix(net, x):
    pairs = np.arange(2 * ROWS).reshape(ROWS, 2)
    np.random.shuffle(pairs)
    yield net(x[pairs[:, 0] // 2]).square().cumsum(0)


def a_list_that_is_kept(net, x):
    random.shuffle(net.order)
    yield net(x[net.order]).square().cumsum(0) + net(x[random.choice(net.order)])
    yield net(x[random.sample(net.order, 3)]) * random.choices([1, 2, 3], k=2)[0]


def numbers_of_a_list(net, x):
    order = [3, 5, 1]
    random.shuffle(order)
    yield net(x[order]).square().cumsum(0) * random.sample([2, 5, 7], 2)[0] + random.choice((1, 4))


SHUFFLED = (
    minibatches, by_a_generator, views, tensors_before_and_after, kept, made_in_a_loop, made_of_parts, written_between,
    a_matrix, a_list_that_is_kept, numbers_of_a_list,
)  # fmt: skip
NATIVELY = {}


def natively(body):
    NATIVELY[body.__name__] = body
    return body


@natively
def a_tensor_over_it(net, x):
    rows = np.arange(ROWS)
    over = torch.from_numpy(rows)
    y = net(x[over])
    np.random.shuffle(rows)
    yield (y * net(x[over])).cumsum(0)


@natively
def an_array_that_is_kept(net, x):
    if not net.kept:
        net.kept.append(np.arange(ROWS))
    np.random.shuffle(net.kept[0])
    yield net(x[net.kept[0]]).square().cumsum(0)


@natively
def by_python(net, x):
    rows = np.arange(ROWS)
    random.shuffle(rows)
    yield net(x[rows]).square().cumsum(0)


def trained(body):
    def make() -> Program:
        net = Net()
        random.seed(3)
        np.random.seed(3)

        def step(x):
            loss = sum(part.mean() for part in body(net, x))
            loss.backward()
            net.optimizer.step()
            net.optimizer.zero_grad()
            return loss.detach()

        return Program(
            step, lambda index: (torch.randn(ROWS, WIDTH),), (net.layer, net.optimizer, net.order, net.kept, [])
        )

    return make


def states(program, index):
    program.watch[-1].append((random.getstate()[1][-1], np.random.get_state()[2], np.random.get_state()[1].tolist()))


@pytest.mark.parametrize("body", SHUFFLED, ids=lambda body: body.__name__)
def test_shuffled_in_the_step(body):
    report = parity(trained(body), steps=20, captures=None, between=states)
    assert not report.breaks
    assert len(report.captures) <= 3


@pytest.mark.parametrize("body", NATIVELY.values(), ids=lambda body: body.__name__)
def test_shuffled_natively(body):
    parity(trained(body), steps=6, captures=None, between=states, whole=False)


def shuffled_tensors(net, x):
    parts = [net(x) * place for place in range(4)]
    random.shuffle(parts)
    yield from (part.square() * place for place, part in enumerate(parts))


def some_of_many(net, x):
    parts = [net(x) * place for place in range(6)]
    first, second = random.sample(parts, 2)
    yield first.square() - second
    yield from random.choices(parts, k=3)


def some_views(net, x):
    views = [x, x.flip(0), x * 2, x - 1]
    first, second = random.sample(views, 2)
    yield (net(first) - net(second)).square()


def shuffled_rows(net, x):
    rows = list(net(x).unbind(0))
    random.shuffle(rows)
    yield torch.stack(rows[:3]).square()


OF_TENSORS = (shuffled_tensors, some_of_many, some_views, shuffled_rows)


@pytest.mark.parametrize("body", OF_TENSORS, ids=lambda body: body.__name__)
def test_tensors_of_the_step_are_drawn_natively(body):
    report = parity(trained(body), steps=30, captures=1, between=states, whole=False)
    assert {each.code for each in report.breaks} == {"SFX103"}


def test_a_sample_of_functions_is_drawn_natively_after_some_captures():
    functions = [torch.sin, torch.cos, torch.tanh, torch.relu, torch.sigmoid]

    def body(net, x):
        y = net(x)
        for function in random.sample(functions, 3):
            y = function(y)
        yield y

    report = parity(trained(body), steps=40, captures=9, between=states, whole=False)
    assert report.breaks and not report.fallbacks


def test_looked_up_by_a_number_that_changes():
    """A dict that the step makes: the key is guarded."""

    def body(net, x):
        scales = {0: 1.0, 1: 2.0}
        scales[random.randint(0, 1)] += 0.5
        yield net(x) * scales[random.randint(0, 1)]

    report = parity(trained(body), steps=12, captures=None, between=states)
    assert not report.breaks
    assert len(report.captures) <= 4


def test_decided_by_an_array_of_one_number():
    """As in CutMix: ``r = np.random.rand(1)``, ``if r < 0.5``."""

    def body(net, x):
        r = np.random.rand(1)
        if r < 0.5:
            x = x[torch.randperm(ROWS)]
        yield net(x).square().cumsum(0)

    report = parity(trained(body), steps=20, captures=2, between=states)
    assert not report.breaks


def test_the_truth_of_many_numbers_raises():
    def step(x):
        return x * 2 if np.random.rand(2) < 0.5 else x

    run = sidefx_train.compile(step, backend="eager")
    with pytest.raises(ValueError, match="ambiguous"):
        run(torch.ones(2))
