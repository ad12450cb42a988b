"""Truth values among arguments and items that change between calls: inputs, guarded only where the step decides."""

from __future__ import annotations

import copy
import json
import math
import operator
import pickle
from collections import deque

import numpy as np
import pytest
import torch

from tests.support.parity import Program, parity

ROWS, WIDTH = 3, 4


DATA = {
    "as they are": lambda x, d, e: (d, [e]),
    "floats": lambda x, d, e: float(d) + float(e),
    "integers": lambda x, d, e: (int(d), int(e)),
    "arithmetic": lambda x, d, e: (1 - d, d + e, d * -2.5, d / 2 - (e + 1) ** 2, e**2 // 1),
    "beside tensors": lambda x, d, e: x * (1 - d) + e * x,
    "difference": lambda x, d, e: x - (1.0 - float(d)) * e,
    "arguments": lambda x, d, e: torch.where(x > 0, x, float(d)).clamp(max=2 + e),
    "sum": lambda x, d, e: x * sum([d, e, True]),
    "tensor": lambda x, d, e: torch.tensor([d, True, e]),
    "tensor of floats": lambda x, d, e: torch.tensor([[d, e], [1, 0.5]], dtype=torch.float32),
    "new tensor": lambda x, d, e: x.new_tensor([d, e]),
}
"""One graph for all values, once both have changed."""

DECISIONS = {
    "negation": lambda x, d: not d,
    "inverse": lambda x, d: ~d,
    "bit operations": lambda x, d: (d & True, d | False, d ^ True, d << 1),
    "and, or": lambda x, d: (d and 3, d or 3),
    "identity": lambda x, d: (d is True, d is False),
    "equality": lambda x, d: (d == True, d == 1, d != False),  # noqa: E712
    "text": lambda x, d: (f"{d}", str(d), repr((d, 1)), f"{d!r:>6}", "%s %d" % (d, d)),  # noqa: UP031
    "JSON": lambda x, d: json.dumps({"done": d}),
    "pickle": lambda x, d: pickle.dumps(d),
    "copies": lambda x, d: (copy.copy(d), copy.deepcopy([d])),
    "class": lambda x, d: (type(d), isinstance(d, bool), isinstance(d, int), d.__class__),
    "key": lambda x, d: ({True: 5, False: 7}[d], {d: 1}, {d, True}, d in (True,)),
    "place in a list": lambda x, d: ([4, 9][d], (5, 6)[d], "ab"[d], [1, 2, 3][d:], deque([1, 2])[d]),
    "place of an item": lambda x, d: [True, False].index(d),
    "arithmetic": lambda x, d: (d + 1, d * 2, d**2, -d, +d, abs(d), divmod(7, d + 1), round(d), math.sqrt(d)),
    "comparison": lambda x, d: (d < 1, d >= 0.5, max(d, 0), min(d, 0.5)),
    "branch": lambda x, d: x if d else -x,
    "flag of a function": lambda x, d: x.mean(0, keepdim=d),
    "sign": lambda x, d: (-d, abs(d), round(d)),
    "arithmetic with a tensor": lambda x, d: ((x > 0) * d, x.long() + d, x**d, (x > 0) & d),
    "NumPy": lambda x, d: (np.array([d, True]), np.bool_(d)),
    "filled": lambda x, d: torch.full((2,), d),
    "index of a tensor": lambda x, d: x[d],
    "index of a dimension": lambda x, d: x[:, [d, True, False, d]],
    "index with a place": lambda x, d: x[d, 0],
    "bound of a slice": lambda x, d: x[d:],
    "bound of a dimension": lambda x, d: x[0, d:],
    "index of a method": lambda x, d: x.__getitem__((slice(d, None), 0)),
    "index of an operator": lambda x, d: operator.getitem(x, d),
    "written by index": lambda x, d: operator.setitem(x, (d, 0), 2.0),
    "written to a slice": lambda x, d: x.__setitem__((slice(d, None), 0), 2.0),
}
"""The step decides: one graph for each value."""


def inserted(x, d):
    made, queue = [1, 2], deque([1, 2])
    made.insert(d, 9)
    queue.insert(d, 9)
    return made, list(queue), [4, 5].pop(d)


DECISIONS["inserted"] = inserted

PLACES = {
    "argument": lambda held, d, e, index: (d, e),
    "items of a list": lambda held, d, e, index: held.items,
    "items of a tuple": lambda held, d, e, index: held.pair,
    "items at a changing index": lambda held, d, e, index: (held.many[index], held.many[index + 1]),
}


class Held:
    def __init__(self):
        self.items, self.pair, self.log = [False, False], (False, False), []
        self.many = [False, False, True, True, False, True, False, False, True, True]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", DATA)
def test_data_is_an_input(form, place):
    def make() -> Program:
        layer = torch.nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        held = Held()

        def step(x, d, e, index):
            one, other = PLACES[place](held, d, e, index)
            y = layer(x)
            found = DATA[form](y, one, other)
            held.log.append((found, one))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return found, type(found).__name__

        def batch(index):
            pair = (index % 2 == 1, index // 2 % 2 == 1)
            held.items[:], held.pair = pair, pair
            return torch.randn(ROWS, WIDTH), *pair, index

        return Program(step, batch, (layer, optimizer, held.log))

    parity(make, steps=8, captures=3)


VALUES = {
    "argument": (lambda given: given, (False, True, False)),
    "comparison": (lambda given: given > 1.5, (1.0, 2.0, 1.25)),
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("form", DECISIONS)
def test_decisions_are_guarded(form, value):
    made_of, numbers = VALUES[value]

    def make() -> Program:
        log: list = []

        def step(x, number):
            d = made_of(number)
            found = DECISIONS[form](x * 2, d)
            log.append((found, d))
            return found, type(found).__name__

        return Program(step, lambda index: (torch.randn(ROWS, WIDTH), numbers[index % 3]), (log,))

    parity(make, steps=8, captures=3)


def test_a_tensor_minus_a_truth_value_raises():
    def make() -> Program:
        def step(x, d):
            try:
                return x - d
            except RuntimeError as error:
                return str(error)

        return Program(step, lambda index: (torch.randn(ROWS, WIDTH), index % 2 == 1), ())

    parity(make, steps=4, captures=None, whole=False)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_transitions_of_episodes(backend):
    def make() -> Program:
        layer = torch.nn.Linear(WIDTH, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(state, reward, done, last):
            with torch.no_grad():
                target = reward + 0.9 * layer(last).mean() * (1 - done)
            loss = (layer(state).mean() - target).square()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach(), done

        def batch(index):
            return torch.randn(ROWS, WIDTH), index * 0.5, index % 3 == 2, torch.randn(ROWS, WIDTH)

        return Program(step, batch, (layer, optimizer))

    parity(make, steps=9, captures=3, backend=backend)
