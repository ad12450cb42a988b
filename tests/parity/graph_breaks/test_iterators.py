"""Loops over iterators of C classes with a break in their body; iterators that a step returns."""

from __future__ import annotations

import itertools
import os
import warnings

import pytest
import torch

import sidefx_train
from sidefx_train.compile.common.positioned_iterators import is_reducible
from sidefx_train.errors import SideFXWarning


class Countdown:
    """An iterator written in Python."""

    def __init__(self, start):
        self.left = start

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


class Walked:
    """Iterable, with its own iterator class."""

    def __iter__(self):
        return Countdown(3)


def _noted(log, value):
    log.append(("called", value))
    return value


ITERATORS = {
    "map": lambda items, log: map(lambda value: _noted(log, value), items),
    "map over two": lambda items, log: map(max, items, reversed(items)),
    "map over Python's own": lambda items, log: map(str, Countdown(3)),
    "map over an iterable": lambda items, log: map(str, Walked()),
    "map of a method": lambda items, log: map(log.append, items),
    "filter": lambda items, log: filter(lambda value: _noted(log, value) > 1, items),
    "filter None": lambda items, log: filter(None, items),
    "zip of map": lambda items, log: zip(items, map(str, items), strict=False),
    "enumerate filter": lambda items, log: enumerate(filter(None, items)),
    "iter of a function": lambda items, log: iter(lambda: _noted(log, len(log)), 3),
    "reversed dict": lambda items, log: reversed(dict.fromkeys(items)),
    "accumulate": lambda items, log: itertools.accumulate(items, lambda a, b: _noted(log, a * b)),
    "chain": lambda items, log: itertools.chain(items, map(str, items)),
    "chain.from_iterable": lambda items, log: itertools.chain.from_iterable([items, items]),
    "combinations": lambda items, log: itertools.combinations(items, 2),
    "compress": lambda items, log: itertools.compress(items, [1, 0, 1, 1]),
    "count": lambda items, log: itertools.count(items[0], 2),
    "cycle": lambda items, log: itertools.cycle(items),
    "dropwhile": lambda items, log: itertools.dropwhile(lambda value: _noted(log, value) < 2, items),
    "filterfalse": lambda items, log: itertools.filterfalse(lambda value: value == 2, items),
    "islice": lambda items, log: itertools.islice(items, 1, 4),
    "permutations": lambda items, log: itertools.permutations(items, 2),
    "product": lambda items, log: itertools.product(items, "ab"),
    "repeat": lambda items, log: itertools.repeat(items, 3),
    "starmap": lambda items, log: itertools.starmap(pow, zip(items, items, strict=True)),
    "takewhile": lambda items, log: itertools.takewhile(lambda value: _noted(log, value) < 3, items),
    "zip_longest": lambda items, log: itertools.zip_longest(items, "ab", fillvalue=0),
    "groupby": lambda items, log: ((key, list(group)) for key, group in itertools.groupby(items, lambda v: v // 2)),
}


OF_ITERTOOLS = list(ITERATORS)[list(ITERATORS).index("accumulate") :]


def _is_copied(name):
    """From Python 3.14 on, iterators of itertools cannot be copied: a step with a break in their loop runs eagerly."""
    return name not in OF_ITERTOOLS or is_reducible(itertools.count)


def _compare(step, *arguments, captured=True):
    """Compares three calls, each with new arguments: results, errors and arguments after the call."""
    compiled = sidefx_train.compile(step, backend="eager")
    for _ in range(3):
        found = []
        for run in (step, compiled):
            given = [make() for make in arguments]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SideFXWarning)
                found.append((run(*given), given))
        assert repr(found[1]) == repr(found[0])
    report = compiled.report()
    assert report.replays == (3 if captured else 0), report
    assert ["cannot copy an itertools" in each.reason for each in report.fallbacks] == ([] if captured else [True]), (
        report
    )


@pytest.mark.parametrize("name", ITERATORS)
def test_a_loop_that_a_line_breaks(name):
    make = ITERATORS[name]

    def step(items, log):
        rounds = 0
        for value in make(items, log):
            os.times()
            rounds += 1
            log.append((rounds, value))
            if rounds == 6:
                break
        return rounds

    _compare(step, lambda: [1, 2, 3, 2], list, captured=_is_copied(name))


@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_goes_on_after_a_break(name):
    """It has been advanced before, and two names refer to it."""
    make = ITERATORS[name]

    def step(items, log):
        one = other = make(items, log)
        log.append(next(one))
        os.times()
        log.append(next(other, None))
        os.times()
        log.append(list(itertools.islice(one, 3)))
        return one is other

    _compare(step, lambda: [1, 2, 3, 2], list, captured=_is_copied(name))


def test_a_list_that_gets_longer_while_it_is_iterated_over():
    def step(items, log):
        for value in map(lambda value: value * 2, items):
            os.times()
            if len(items) < 6:
                items.append(value)
            log.append(value)

    _compare(step, lambda: [1, 2, 3], list)


def test_tensors_and_their_gradients():
    weight = torch.ones(3, requires_grad=True)

    def step(batch, log):
        weight.grad = None
        total = 0
        for i, part in enumerate(map(lambda row: (row * weight).sum(), batch)):
            os.times()
            total = total + part * i
        total.backward()
        log.append(weight.grad.tolist())

    _compare(step, lambda: torch.arange(6.0).reshape(2, 3), list)


def test_iterators_that_leave_the_step():
    def step(items, log):
        return map(lambda value: _noted(log, value) + 1, items), itertools.chain(items, items)

    compiled = sidefx_train.compile(step, backend="eager")
    for _ in range(2):
        items, log = [1, 2], []
        mapped, chained = compiled(items, log)
        assert (type(mapped), type(chained)) == (map, itertools.chain)
        assert next(mapped) == 2
        items.append(5)
        assert (list(mapped), list(chained)) == ([3, 6], [1, 2, 5, 1, 2, 5])
        assert log == [("called", 1), ("called", 2), ("called", 5)]
    assert compiled.report().replays == (2 if is_reducible(itertools.chain) else 0)


VIEWS = {
    "keys": lambda table: iter(table),
    "values": lambda table: iter(table.values()),
    "items": lambda table: iter(table.items()),
    "reversed keys": lambda table: reversed(table),
    "reversed items": lambda table: reversed(table.items()),
    "members": lambda table: iter(table),
}


def _nothing(table):
    pass


def _added(table):
    if isinstance(table, set):
        table.add(9)
    else:
        table["new"] = 9


def _removed(table):
    if isinstance(table, set):
        table.discard(2)
    else:
        table.pop("b", None)


def _moved(table):
    first = next(iter(table))
    if isinstance(table, set):
        table.discard(first)
        table.add(first)
    else:
        table[first] = table.pop(first)


def _changed(table):
    if isinstance(table, set):
        table.update(list(table))
    else:
        table.update({key: 0 for key in table})


CHANGES = [_nothing, _added, _removed, _changed]


MADE_HERE = ("items", "reversed keys", "members")
FROM_OUTSIDE = ("keys", "values", "reversed items", "members")
"""Loops over a table that the step creates, and over one that it gets, each loop with at least one of them; ``make
slow`` has the others, at least five seconds each."""


@pytest.mark.parametrize(
    ("view", "from_outside"),
    [
        pytest.param(view, from_outside, marks=() if view in often else pytest.mark.slow)
        for from_outside, often in ((True, FROM_OUTSIDE), (False, MADE_HERE))
        for view in VIEWS
    ],
)
@pytest.mark.every(6)
def test_iterators_see_changes_of_their_dict(view: str, from_outside: bool) -> None:
    """Changes before the loop, during it, and after a break; includes the error of a changed size.

    Not compared: CPython's hash table after a size change that is undone after the break; a set that was changed before
    the loop, which continues over a copy.
    """
    make = VIEWS[view]

    def table():
        return {1, 2, 3} if view == "members" else {"a": 1, "b": 2, "c": 3}

    def run(before, between, behind):
        def step(x, given):
            table_ = given if from_outside else table()
            before(table_)
            walk = make(table_)
            found = [next(walk)]
            between(table_)
            os.times()
            behind(table_)
            try:
                found += list(walk)
            except RuntimeError as error:
                found.append(str(error))
            return found, list(table_), x + len(found)

        return step

    for before, between, behind in itertools.product([*CHANGES, _moved], CHANGES, CHANGES):
        if {between, behind} == {_added, _removed} or (view == "members" and before not in (_nothing, _changed)):
            continue
        step = run(before, between, behind)
        compiled = sidefx_train.compile(step, backend="eager")
        for _ in range(2):
            wanted, given = table(), table()
            want = step(torch.ones(1), wanted)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SideFXWarning)
                got = compiled(torch.ones(1), given)
            names = [change.__name__ for change in (before, between, behind)]
            assert str(got) == str(want) and list(given) == list(wanted), names
