"""``next`` of iterators that an object holds: the items ahead are found at each call, and the real one is advanced."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.parity import Program, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")

NUMBERS = [1.0, 0.5, 2.0, 4.0, 0.25, 3.0, 1.5, 2.5, 0.75]


class Holder:
    """Holds an iterator, what it runs over, and what it has given."""

    def __init__(self, data, it):
        self.data, self.it = data, it(data)
        self.seen: list = []


def first(x, item):
    return x * (item[0] if isinstance(item, tuple) else item)


def once(x, held):
    return first(x, next(held.it))


def twice(x, held):
    return first(first(x, next(held.it)), next(held.it))


def or_default(x, held):
    return first(x, next(held.it, 0.5))


def from_the_start_again(x, held):
    try:
        item = next(held.it)
    except StopIteration:
        held.it = iter(held.data)
        item = next(held.it)
    return first(x, item)


def in_c_code(x, held):
    return [first(x, item) for item in itertools.islice(held.it, 2)], [a for a, _ in zip("a", held.it, strict=False)]


def around_a_break(x, held):
    x = first(x, next(held.it, 2.0))
    if x.sum() > 1e6:
        x = x + 1
    return first(x, next(held.it, 3.0))


def changed_first(x, held):
    held.data.append(held.data[-1])
    return first(x, next(held.it, 3.0))


def changed_after(x, held):
    item = next(held.it, 3.0)
    del held.data[0]
    return first(x, item)


def noted(x, held):
    held.seen.append(next(held.it, None))
    return x * len(held.seen), held.seen[-1]


ITERATORS = {
    "list": iter,
    "tuple": lambda data: iter(tuple(data)),
    "reversed": reversed,
    "range": lambda data: iter(range(5, 50, 5)),
    "cycle": lambda data: itertools.cycle(data[:3]),
    "enumerate": enumerate,
    "zip": lambda data: zip(data, data[1:], strict=False),
    "numbered pairs": lambda data: enumerate(zip(data, data, strict=False)),
}
OTHERS = {
    "cycle of zip": lambda data: itertools.cycle(zip(data[:3], [1, 2], strict=False)),
    "zip of other lengths": lambda data: zip(data, [1, 2], strict=False),
    "strict zip": lambda data: zip(data, [1, 2], strict=True),
    "items of a dict": lambda data: iter(dict(enumerate(data)).values()),
}
USES = [once, twice, or_default, from_the_start_again, in_c_code]


def program(use, it, data=None):
    def make() -> Program:
        held = Holder(list(NUMBERS if data is None else data), it)

        def step(x):
            return use(x, held)

        return Program(step, lambda i: (torch.full((2,), i + 1.0),), (held, held.data))

    return make


def takes_one(program, index):
    """Something else takes an item."""
    if index == 2:
        next(program.watch[0].it)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ITERATORS)
def test_advances(name, use):
    """The whole step is captured, once for another item and once for the end."""
    raises = use in (once, twice)
    report = parity(
        program(use, ITERATORS[name]),
        steps=3 if raises else 14,
        captures=4,
        between=takes_one,
        whole=use is not in_c_code,
    )
    asked_past_the_end = use is in_c_code and name in ("zip", "numbered pairs")
    assert bool(report.breaks) == asked_past_the_end, f"{report}"


@pytest.mark.parametrize("use", [or_default, in_c_code, twice])
@pytest.mark.parametrize("name", OTHERS)
def test_other_iterators(name, use):
    parity(program(use, OTHERS[name]), steps=5, captures=None, whole=False)


@pytest.mark.parametrize("name", ["list", "cycle", "zip"])
def test_raises_at_the_end(name):
    parity(program(twice, ITERATORS[name]), steps=7, captures=None, whole=False)


@pytest.mark.parametrize("use", [around_a_break, changed_first, changed_after, noted])
@pytest.mark.parametrize("name", ["list", "cycle", "enumerate"])
def test_other_uses(name, use):
    parity(program(use, ITERATORS[name]), steps=12, captures=None, between=takes_one, whole=False)


def test_batches_of_other_sizes_and_kinds():
    data = [torch.full((2,), 3.0), torch.full((2,), 2.0), torch.full((1,), 2.0), 4, 2.5, torch.ones(2, 2), "text"]

    def use(x, held):
        item = next(held.it)
        return x * (len(item) if isinstance(item, str) else item)

    parity(program(use, lambda data: itertools.cycle(data), data), steps=21, captures=None, whole=False)


def shared(data):
    it = iter(data)
    return [it, zip(it, it, strict=False), itertools.cycle(it)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_iterators_that_others_advance(place):
    """What another iterator or variable can advance is advanced natively."""

    def use(x, held):
        return first(x, next(held.it[place])), next(held.it[0])

    parity(program(use, shared), steps=3, captures=None, whole=False)


def test_an_iterator_of_another_kind_takes_its_place():
    def between(program, index):
        held = program.watch[0]
        if index == 3:
            held.it = itertools.cycle(held.data)
        if index == 5:
            held.it = (item for item in held.data)
        if index == 7:
            held.it = iter([])

    parity(program(or_default, iter), steps=9, captures=None, between=between, whole=False)


def test_a_long_loop_shares_its_parts():
    def use(x, held):
        for item in held.it:
            x = torch.sin(x * item)
        held.it = iter(held.data)
        return x

    report = parity(program(use, iter, NUMBERS * 4), steps=3, captures=None, whole=False)
    assert report.graph_count <= 4, f"{report}"


def test_in_a_training_step_of_the_default_backend():
    def make() -> Program:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        held = Holder([torch.full((4, 3), each) for each in NUMBERS[:3]], itertools.cycle)

        def step(x):
            loss = model(x + next(held.it)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda i: (torch.ones(4, 3),), (model, optimizer, held))

    parity(make, steps=7, backend="inductor")


def of_two(x, held):
    return first(x, next(held.it)), first(x, next(held.other))


def of_one(x, held):
    held.seen = [held.other]
    return first(x, next(held.it))


@pytest.mark.parametrize("use", [of_two, of_one])
@pytest.mark.parametrize("name", ["list", "reversed", "range", "cycle", "zip", "count"])
def test_two_that_become_one(name, use):
    """An entry for two iterators does not serve where both names hold one, which gives each item once."""
    made = {**ITERATORS, "count": lambda data: itertools.count(len(data))}[name]

    def make() -> Program:
        held = Holder(list(NUMBERS) * 2, made)
        held.other = made([2.5, 0.5, *held.data])
        return Program(lambda x: use(x, held), lambda i: (torch.full((2,), i + 1.0),), (held, held.data))

    def between(program, index):
        held = program.watch[0]
        if index in (2, 4):
            held.other = held.it if index == 2 else made(held.data)

    parity(make, steps=6, captures=None, between=between, whole=False)


def writes_ahead(x, held):
    held.target.append(2.0)
    held.target[3] = 50.0
    return first(x, next(held.it))


def empties(x, held):
    held.target.clear()
    return first(x, next(held.it, 0.25))


def appends(x, held):
    held.target.append(7.0)
    return first(x, next(held.it, 0.25))


def removes_after(x, held):
    item = next(held.it, 0.25)
    held.target.reverse()
    return first(x, item)


@pytest.mark.parametrize("use", [writes_ahead, empties, appends, removes_after])
@pytest.mark.parametrize("name", ["list", "enumerate", "zip"])
def test_over_a_list_that_the_step_changes_at_later_calls(name, use):
    """The list that the step changes is another one at first, then the one that the iterator runs over."""

    def make() -> Program:
        held = Holder(list(NUMBERS), ITERATORS[name])
        return Program(lambda x: use(x, held), lambda i: (torch.full((2,), i + 1.0),), (held, held.data))

    def between(program, index):
        held = program.watch[0]
        held.data = list(NUMBERS)
        held.it, held.target = ITERATORS[name](held.data), held.data if index == 3 else list(NUMBERS)
        taken = {appends: len(NUMBERS) - (name == "zip"), writes_ahead: 3}.get(use, 0)
        for _ in range(taken):
            next(held.it)
        if use is appends and index != 3:
            list(held.it)

    parity(make, steps=5, captures=None, between=between, whole=False)
