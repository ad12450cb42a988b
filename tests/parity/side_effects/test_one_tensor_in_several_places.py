"""One tensor in several places of the arguments, at other places in every call: one graph if the step only reads it."""

from __future__ import annotations

import random
from collections import deque
from typing import NamedTuple

import pytest
import torch

from tests.support.parity import Program, parity

ROWS, WIDTH = 4, 3


class Transition(NamedTuple):
    state: torch.Tensor
    action: int
    reward: float
    following: torch.Tensor
    last: bool


class Net:
    def __init__(self):
        self.layer = torch.nn.Linear(WIDTH, 2)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.05)
        self.held = []

    def train(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def learn(net, batch):
    """The update of Q-learning, as tutorials write it."""
    batch = Transition(*zip(*batch, strict=True))
    states, following = torch.stack(batch.state), torch.stack(batch.following)
    actions, rewards = torch.tensor(batch.action), torch.tensor(batch.reward)
    last = torch.tensor(batch.last, dtype=torch.float32)
    with torch.no_grad():
        target = rewards + 0.9 * net.layer(following).max(1).values * (1 - last)
    return net.layer(states).gather(1, actions[:, None]).squeeze(1) - target


def episode(count):
    """Transitions of one episode: the observation after a step is the one before the next."""
    states = [torch.randn(WIDTH) for _ in range(count + 1)]
    return [Transition(states[i], i % 2, i * 0.1, states[i + 1], i % 5 == 4) for i in range(count)]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_batches_of_transitions(backend):
    def make() -> Program:
        net, memory, draws = Net(), episode(9), random.Random(1)
        return Program(
            lambda batch: net.train(learn(net, batch).square().mean()),
            lambda index: (draws.sample(memory, ROWS),),
            (net.layer, net.optimizer),
        )

    parity(make, steps=40, captures=8, backend=backend)


def test_a_buffer_that_grows_in_the_step():
    def make() -> Program:
        net, memory, draws = Net(), deque(maxlen=20), random.Random(1)
        transitions = episode(60)

        def step(state, action, reward, following, last):
            memory.append(Transition(state, action, reward, following, last))
            if len(memory) < ROWS:
                return None
            return net.train(learn(net, draws.sample(memory, ROWS)).square().mean())

        return Program(step, lambda index: transitions[index], (net.layer, net.optimizer))

    report = parity(make, steps=60, captures=None, whole=False)
    assert not report.fallbacks and len(report.captures) <= 5
    assert all(len(part.captures) <= 10 and not part.fallbacks for part in report.parts)


def compared(net, xs):
    return xs[0] * 2 if xs[0] is xs[1] else xs[0] + 2 * xs[2]


def found_in_a_list(net, xs):
    return xs[0] * (1 + sum(x is xs[0] for x in xs)) + len({id(x) for x in xs})


def keys(net, xs):
    return sum(x * 2 for x in dict.fromkeys(xs))


def counted(net, xs):
    return xs[0] * len(set(xs))


def written(net, xs):
    xs[0].add_(1)
    return xs[1] * 2 + xs[2]


def written_through_a_view(net, xs):
    xs[0].view(-1)[0] = 3
    return xs[1] * 2 + xs[2]


def resized(net, xs):
    xs[0].unsqueeze_(0)
    return xs[1].sum() + xs[2].dim()


def made_a_leaf(net, xs):
    xs[0].requires_grad_()
    (xs[1] * xs[0]).sum().backward()
    return xs[1].grad if xs[1].grad is not None else xs[0].grad


def given_attributes(net, xs):
    xs[0].kind = len(getattr(xs[1], "kind", "")) * "a" + "b"
    return xs[1] * len(getattr(xs[1], "kind", ""))


def given_a_gradient(net, xs):
    xs[0].grad = xs[2].clone()
    return xs[1] if xs[1].grad is None else xs[1].grad


def kept(net, xs):
    net.held[:] = [xs[0], [xs[1], xs[2]]]
    return xs[0] is xs[1]


def returned(net, xs):
    return xs[0] + 1, xs[1], xs[2], (xs[0],)


def versions(net, xs):
    before = xs[1]._version
    xs[0].mul_(2)
    return xs[1]._version - before


def saved_and_written(net, xs):
    y = (net.layer(xs[0]) * xs[1][:, :2]).sum()
    xs[2].add_(1)
    try:
        y.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return y.detach()


BODIES = [compared, found_in_a_list, keys, counted, written, written_through_a_view, resized, made_a_leaf]
BODIES += [given_attributes, given_a_gradient, kept, returned, versions, saved_and_written]

PATTERNS = [(0, 1, 2), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 0, 0), (0, 1, 2), (0, 0, 1), (1, 1, 1), (2, 1, 1)]


READ_FIRST = [(0, 1, 2), (0, 1, 1), (1, 0, 0), (0, 1, 2), (0, 0, 1), (0, 1, 0), (0, 0, 0), (0, 1, 1)]
"""The first tensor, which steps change, is the last to be in another place, too."""


@pytest.mark.parametrize("shape", ["list", "tuple", "arguments"])
@pytest.mark.parametrize("patterns", [PATTERNS, READ_FIRST], ids=["any first", "read first"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_steps_that_do_more_than_read(body, patterns, shape):
    def make() -> Program:
        net = Net()
        made = []

        def step(*xs):
            return body(net, xs if shape == "arguments" else xs[0])

        def batch(index):
            three = [torch.randn(ROWS, WIDTH) for _ in range(3)]
            given = [three[place] for place in patterns[index % len(patterns)]]
            made[:] = given
            return given if shape == "arguments" else (tuple(given) if shape == "tuple" else given,)

        return Program(step, batch, (net.layer, net.held, made))

    parity(make, steps=2 * len(patterns), captures=None, whole=False)


@pytest.mark.parametrize("shape", ["list", "tuple", "arguments"])
def test_one_tuple_in_several_places(shape):
    def make() -> Program:
        net = Net()

        def step(*pairs):
            pairs = pairs if shape == "arguments" else pairs[0]
            same = [pair[0] for pair in pairs]
            net.held[:] = pairs
            return torch.stack(same).sum() + sum(pair[1] for pair in pairs)

        def batch(index):
            three = [(torch.randn(WIDTH), index * 0.5) for _ in range(3)]
            given = [three[place] for place in PATTERNS[index % len(PATTERNS)]]
            return given if shape == "arguments" else (tuple(given) if shape == "tuple" else given,)

        return Program(step, batch, (net.held,))

    parity(make, steps=2 * len(PATTERNS), captures=5)


def marked(net, xs):
    net.buffer.kind = "b"
    return xs[1] * len(getattr(xs[1], "kind", ""))


def filled(net, xs):
    net.buffer.fill_(2)
    return xs[1] * 2 + xs[2]


def only_read(net, xs):
    return net.buffer * xs[1] + xs[2] * (2 if xs[1] is net.buffer else 1)


@pytest.mark.parametrize("body", [marked, filled, only_read], ids=lambda body: body.__name__)
def test_a_tensor_that_the_entry_holds_is_an_argument(body):
    def make() -> Program:
        net = Net()
        net.buffer = torch.ones(ROWS, WIDTH)

        def step(xs):
            return body(net, xs)

        def batch(index):
            one, other, third = (torch.randn(ROWS, WIDTH) for _ in range(3))
            net.buffer.__dict__.clear()
            patterns = [(one, other, third), (one, other, other), (one, one, other), (one, other, third)]
            patterns += [(one, net.buffer, other), (net.buffer, one, one), (one, net.buffer, net.buffer)]
            return (patterns[index % len(patterns)],)

        return Program(step, batch, (net.buffer,))

    parity(make, steps=14, captures=None, whole=False)


def test_offsets_of_jagged_tensors():
    """Sizes of jagged tensors are equal if their offsets are one tensor."""

    def make() -> Program:
        def step(x, first, second):
            one = torch.nested.nested_tensor_from_jagged(x, first)
            other = torch.nested.nested_tensor_from_jagged(x * 2, second)
            return (one + other).values() if one.shape == other.shape else one.values().sin()

        def batch(index):
            offsets = [torch.tensor([0, 2, 3, ROWS]) for _ in range(2)]
            return torch.randn(ROWS, WIDTH), offsets[0], offsets[(index + 1) % 3 % 2]

        return Program(step, batch, ())

    parity(make, steps=9, captures=None, whole=False)
