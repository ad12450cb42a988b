"""NumPy and ``json`` read numbers of the step out of containers of any class as the numbers that they are."""

from __future__ import annotations

import collections
import json
import operator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import sidefx_train
from tests.support.parity import Program, parity
from tests.support.symbolic_numbers import shown

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


class Items(list):
    pass


class Led(list):
    """A list whose iteration is written in Python."""

    def __iter__(self):
        return iter([1.0, *list.__iter__(self)])


class Triple(NamedTuple):
    a: float
    b: float
    c: float


class Sequence:
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


HOLDERS = {
    "deque": collections.deque,
    "list subclass": Items,
    "list with an iteration of its own": Led,
    "named tuple": lambda items: Triple(*items),
    "sequence in Python": Sequence,
    "UserList": collections.UserList,
    "nested": lambda items: [collections.deque(items), Triple(*items)],
}


def dot(held):
    return (np.ones(3) * 0.1).dot(held) if len(list(held)) == 3 else None


CALLS = [np.mean, np.max, np.std, np.exp, np.array, dot]


def both(step, compiled, *args) -> None:
    found, expected = compiled(*args), step(*args)
    assert repr(shown(found)) == repr(shown(expected))
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(other)


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())
def test_functions_of_numpy(hold):
    """They compute in another order than Python, and their results are numbers of NumPy."""

    def of_the_graph(x):
        items = [(x * 0.3).sum().item(), (x * 0.7).sum().item(), x.mean().item()]
        return tuple(call(hold(items)) for call in CALLS)

    def from_outside(value):
        return tuple(call(hold([value, value * 0.7, value + 0.1])) for call in CALLS)

    captured = sidefx_train.compile(of_the_graph, backend="eager")
    for call in range(2):
        both(of_the_graph, captured, torch.ones(3) * 0.1 * (call + 1))
    captured = sidefx_train.compile(from_outside, backend="eager")
    for value in (0.3, 0.7, 1.1):
        both(from_outside, captured, value)


METRICS: dict[str, Any] = {
    "ordered": lambda a, b: collections.OrderedDict(a=a, b=b),
    "defaultdict": lambda a, b: collections.defaultdict(list, a=[a, b]),
    "counter": lambda a, b: collections.Counter(a=a),
    "tuples": lambda a, b: {"a": [Triple(a, b, a)]},
}


@pytest.mark.parametrize("metrics", METRICS.values(), ids=METRICS.keys())
def test_json(metrics):
    def step(x, value):
        return json.dumps(metrics((x * 0.3).sum().item(), value)), json.dumps(metrics(value, value / 3))

    captured = sidefx_train.compile(step, backend="eager")
    for value in (0.3, 0.7, 1.1):
        both(step, captured, torch.ones(3) * value, value)


def test_operators_and_callbacks_of_numpy():
    def step(x):
        number = (x * 0.3).sum().item()
        filled = np.empty(2, object)
        filled[0], filled[1] = number, 0.1
        scaled = np.vectorize(lambda each: each * number)(np.arange(3.0)).sum()
        encoded = json.dumps({"a": Sequence(())}, default=lambda _: {"v": number})
        return np.arange(3.0) @ [number, 0.1, 0.7], filled.sum(), scaled, encoded, np.ones(3)[[int(number)]].sum()

    captured = sidefx_train.compile(step, backend="eager")
    for call in range(2):
        both(step, captured, torch.ones(3) * (call + 1) * 0.7)


def test_lists_are_searched_by_their_own_methods():
    def step(value):
        held = Led([value, value * 2])
        found = held.index(value * 2), held.count(1.0)
        held.remove(value)
        return (*found, list.copy(held))

    captured = sidefx_train.compile(step, backend="eager")
    for value in (3.0, 4.0, 5.0):
        both(step, captured, value)


def test_meter_of_a_window():
    """The mean of a window is a number of NumPy from the first call on."""

    def made():
        window: collections.deque = collections.deque(maxlen=4)

        def step(x):
            window.append((x * 0.3).sum().item())
            return np.mean(window), np.median(window)

        return step

    step, captured = made(), sidefx_train.compile(made(), backend="eager")
    for call in range(10):
        both(step, captured, torch.ones(3) * (call + 1))
    assert len(captured.report().captures) <= 3


def test_generator():
    """Newer releases of NumPy raise, older ones add."""

    def step(x):
        number = x.sum().item()
        try:
            return (np.sum(each * number for each in range(3)),)
        except TypeError as error:
            return (str(error),)

    captured = sidefx_train.compile(step, backend="eager")
    both(step, captured, torch.ones(3))


class _Deque(collections.deque):
    pass


class _Dict(dict):
    pass


@pytest.mark.parametrize("kind", [list, collections.deque, _Deque, dict, _Dict])
def test_index_of_numpy(kind):
    """A number that changes is stored at an index of NumPy, into a container with other such numbers."""

    def make() -> Program:
        pairs = issubclass(kind, dict)
        held = kind({0: 0.5, 1: 1.5} if pairs else [0.5, 1.5])
        places = np.array([1, 0])

        def step(x):
            total = held[0] + x.item()
            made = kind({0: total} if pairs else [total, total])
            made[np.int64(1)] = total * 2
            for place, number in zip(places, (total, total * 3), strict=True):
                held[place] = number
            operator.setitem(held, np.int64(1), held[np.int32(1)] + 1)
            made[2 if pairs else 0] = 0.0
            del made[np.int64(0)]
            return x + 1, made

        return Program(step, lambda i: (torch.tensor(float(i)),), (held,))

    report = parity(make, steps=8, captures=None)
    assert len(report.captures) <= 3, f"{report}"


@pytest.mark.parametrize("kind", [list, collections.deque])
def test_c_code_that_gets_values_changes_a_container(kind):
    """What C code of NumPy's numbers writes into a copy is not lost."""

    def make() -> Program:
        held = kind([0.5, 1.5])

        def step(x):
            held[0] = held[0] + x.item()
            same = held
            same *= np.int64(2)
            return x + 1, held.pop(), held.pop()

        return Program(step, lambda i: (torch.tensor(float(i)),), (held,))

    parity(make, steps=5, captures=None, whole=False)


KEYS = {"truth": lambda k: k > 1, "integer": lambda k: k, "float": lambda k: k * 0.5, "pair": lambda k: (k > 1, k)}
HASHED_BY_C = {
    "counted": lambda key, kept: collections.Counter([key, 1, key]),
    "counted outside": lambda key, kept: kept["counts"].update((key, key)),
    "most common": lambda key, kept: collections.Counter(collections.deque([key, key, 1])).most_common(1),
    "difference": lambda key, kept: {1, 5}.difference([key]),
    "intersection": lambda key, kept: {1, 2, 0.5}.intersection((key, 1)),
    "disjoint": lambda key, kept: kept["members"].isdisjoint([key]),
    "symmetric difference": lambda key, kept: kept["members"].symmetric_difference_update([key]),
    "updated": lambda key, kept: kept["members"].update(collections.deque([key])),
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("hashed", HASHED_BY_C.values(), ids=HASHED_BY_C)
def test_changing_numbers_that_c_code_hashes(hashed, key) -> None:
    """Regression: a Counter kept symbols of the capture, and sets did not find truth values."""

    def step(x, k, kept):
        return hashed(key(k), kept), x + 1

    captured = sidefx_train.compile(step, backend="eager", keep_slower=True)
    states = [{"counts": collections.Counter([1]), "members": {1, 5}} for _ in range(2)]
    for k in (1, 2, 3, 0, 2, 1, 5):
        found = [run(torch.ones(1), k, kept)[0] for run, kept in zip((step, captured), states, strict=True)]
        assert repr(found[0]) == repr(found[1])
        assert repr(states[0]["counts"]) == repr(states[1]["counts"])
        assert sorted(map(repr, states[0]["members"])) == sorted(map(repr, states[1]["members"]))
