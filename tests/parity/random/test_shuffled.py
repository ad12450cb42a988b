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


# ---------------------------------------------------------------------- arrays from outside
def indexes_with_it(net, x, rows):
    np.random.shuffle(rows)
    yield net(x[torch.from_numpy(rows)]).square().cumsum(0)


def indexes_directly(net, x, rows):
    np.random.shuffle(rows)
    yield net(x[rows]).square().cumsum(0)


def takes_parts_of_it(net, x, rows):
    net.numpy.shuffle(rows)
    for start in range(0, ROWS, 2):
        yield net(x[rows[start : start + 2]]) * (start + 1)
    yield net(x) * float(rows[0]) + rows.argmax()


def decides_by_it(net, x, rows):
    np.random.shuffle(rows)
    yield net(x) * 2 if rows[0] > 3 else net(x)


def shuffles_twice(net, x, rows):
    np.random.shuffle(rows)
    np.random.shuffle(rows)
    yield net(x[torch.from_numpy(rows)]).cumsum(0)


def draws_before_and_after(net, x, rows):
    yield net(x) * np.random.rand()
    np.random.shuffle(rows)
    yield net(x[rows]).cumsum(0) * np.random.rand()


def keeps_a_tensor_over_it(net, x, rows):
    np.random.shuffle(rows)
    net.kept[:] = [torch.from_numpy(rows), rows, rows[2:4]]
    yield net(x[rows]).cumsum(0)


FROM_OUTSIDE = (
    indexes_with_it, indexes_directly, takes_parts_of_it, decides_by_it, shuffles_twice, draws_before_and_after,
    keeps_a_tensor_over_it,
)  # fmt: skip


def reads_it_before(net, x, rows):
    yield net(x) * float(rows[0])
    np.random.shuffle(rows)
    yield net(x[rows]).cumsum(0)


def prints_it_before(net, x, rows):
    print(rows)
    np.random.shuffle(rows)
    print(rows)
    yield net(x[torch.from_numpy(rows)]).cumsum(0)


def uses_a_tensor_over_it_before(net, x, rows):
    over = torch.from_numpy(rows)
    yield net(x[over]).cumsum(0)
    np.random.shuffle(rows)
    yield net(x[over]).cumsum(0)


def uses_an_outside_tensor_over_it(net, x, rows):
    yield net(x[net.over]).cumsum(0)
    np.random.shuffle(rows)
    yield net(x[net.over]).cumsum(0)


def reads_a_view_of_it_before(net, x, rows):
    yield net(x) * float(net.view[0])
    np.random.shuffle(rows)
    yield net(x) * float(net.view[0])


def writes_through_a_tensor(net, x, rows):
    np.random.shuffle(rows)
    yield net(x[torch.from_numpy(rows).clamp_(0, 5)]).cumsum(0)


READ_BEFORE = (
    reads_it_before, prints_it_before, uses_a_tensor_over_it_before, uses_an_outside_tensor_over_it,
    reads_a_view_of_it_before, writes_through_a_tensor,
)  # fmt: skip


def outside(body):
    def make() -> Program:
        net, rows = Net(), np.arange(ROWS)
        np.random.seed(3)
        net.over, net.view = torch.from_numpy(rows), rows[1:]

        def step(x):
            loss = sum(part.mean() for part in body(net, x, rows))
            loss.backward()
            net.optimizer.step()
            net.optimizer.zero_grad()
            return loss.detach()

        watch = (net.layer, rows, net.kept, [])
        return Program(step, lambda index: (torch.randn(ROWS, WIDTH),), watch)

    return make


@pytest.mark.parametrize("body", FROM_OUTSIDE, ids=lambda body: body.__name__)
def test_an_array_from_outside(body):
    report = parity(outside(body), steps=14, captures=None, between=states)
    assert len(report.captures) <= 2, str(report)


@pytest.mark.parametrize("body", READ_BEFORE, ids=lambda body: body.__name__)
def test_an_array_from_outside_that_is_read_before(body):
    parity(outside(body), steps=8, captures=None, between=states, whole=False)


def test_an_array_from_outside_has_its_contents_back_if_a_guard_fails():
    """Sizes and settings change between calls; the array is replaced, made read-only, and one over a tensor."""

    def make() -> Program:
        net, state = Net(), {"rows": np.arange(ROWS), "scale": 1}
        np.random.seed(3)

        def step(x, over):
            np.random.shuffle(state["rows"])
            y = net(x[torch.from_numpy(state["rows"])]) * state["scale"]
            return y.detach().cumsum(0) + over.sum()

        def batch(index):
            over = torch.from_numpy(state["rows"]) if index == 9 else torch.ones(ROWS)
            return torch.randn(ROWS + index // 4, WIDTH), over

        return Program(step, batch, (net.layer, state, [], []))

    def between(program, index):
        state = program.watch[1]
        states(program, index)
        if index == 3:
            state["scale"] = 2
        if index == 5:
            state["rows"] = np.arange(ROWS, dtype=np.int32).astype(np.int64)[::-1]
        if index == 6:
            state["rows"] = np.arange(ROWS)
        if index == 10:
            state["rows"].setflags(write=False)
        if index == 11:
            state["rows"] = np.arange(ROWS)

    parity(make, steps=14, captures=None, between=between, whole=False)


def test_a_tensor_over_the_array_is_used_before_it_is_shuffled():
    """In some calls only: the graph must not read it then."""

    def make() -> Program:
        rows = np.arange(float(ROWS))
        np.random.seed(3)

        def step(x):
            y = x * 2
            np.random.shuffle(rows)
            return y + torch.from_numpy(rows)

        def batch(index):
            return (torch.from_numpy(rows) if index in (2, 5) else torch.ones(ROWS, dtype=torch.float64),)

        return Program(step, batch, (rows, []))

    parity(make, steps=8, captures=None, between=states, whole=False)
