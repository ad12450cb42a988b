"""Functions of the program that compute numbers from numbers: the prologue calls them, whatever they branch on."""

from __future__ import annotations

import functools
import math
import types

import numpy as np
import pytest
import torch

from tests.support.parity import Program, parity

WARMUP, TABLE = 4, [0.5, 0.25, 1.0]


def warms_up(n):
    if n < WARMUP:
        return (n + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * min(n - WARMUP, 20) / 20))


def decays_by_phases(n, base=1.0, phases=((3, 1.0), (6, 0.5), (99, 0.1))):
    for end, factor in phases:
        if n < end:
            return base * factor
    raise ValueError(n)


def looks_up(n):
    return TABLE[n % len(TABLE)] if n > 1 else 2.0


def calls_others(n):
    return warms_up(n) * decays_by_phases(n, base=0.5) if n % 2 else max(0.125, warms_up(n + 1))


def of_numpy(n):
    return float(np.cos(n)) if n % 3 else float(np.float64(0.5))


def sums(n):
    total = 0.0
    for i in range(n % 4):
        total += 1 / (i + 1)
    return total


FUNCTIONS = [
    warms_up,
    decays_by_phases,
    looks_up,
    calls_others,
    of_numpy,
    sums,
    functools.partial(decays_by_phases, base=3.0),
]


def counting(function, **attributes):
    """Returns a program that scales by a function of its counter, before and after other operations."""

    def make() -> Program:
        weight = torch.ones(3, requires_grad=True)
        state = types.SimpleNamespace(n=0, weight=weight, **attributes)

        def step(x):
            state.n += 1
            loss = (weight * x).sum() * function(state.n)
            loss.backward()
            with torch.no_grad():
                weight.sub_(weight.grad, alpha=function(n=state.n))
            weight.grad = None
            return loss.detach()

        return Program(step, lambda index: (torch.randn(3),), (state,))

    return make


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda fn: getattr(fn, "__name__", "partial"))
def test_one_capture(function):
    parity(counting(function), steps=12)


def test_under_inductor():
    parity(counting(warms_up), steps=7, backend="inductor")


class Schedule:
    def __init__(self):
        self.n, self.warmup, self.scale = 0, 3, torch.ones(2)
        self.options = types.SimpleNamespace(floor=0.25)
        self.peak = 1.0

    def factor(self, n):
        return n / self.warmup if n < self.warmup else max(self.options.floor, self.peak - n / 16)

    def sets(self, n):
        self.peak = 2.0 if n > 5 else 1.0
        return self.peak / n

    @property
    def half(self):
        return self.peak / 2

    def by_property(self, n):
        return self.half if n < 4 else 0.125


def scheduled(name, before=lambda schedule: None):
    def make() -> Program:
        schedule = Schedule()

        def step(x):
            schedule.n += 1
            before(schedule)
            schedule.scale.mul_(0.5).add_(x, alpha=getattr(schedule, name)(schedule.n))
            return x * 2

        return Program(step, lambda index: (torch.randn(2),), (schedule,))

    return make


def test_a_method():
    parity(scheduled("factor"), steps=12)


@pytest.mark.parametrize("name", ["sets", "by_property"])
def test_methods_that_do_more(name):
    parity(scheduled(name), steps=9, captures=4)


@pytest.mark.parametrize("between", ["warmup", "floor", "method", "n"])
def test_what_a_method_reads_changes(between):
    def change(program, index):
        (schedule,) = program.watch
        if index == 5:
            schedule.n = 0
        if index in (6, 8) and between == "warmup":
            schedule.warmup = index
        if index in (6, 8) and between == "floor":
            schedule.options = types.SimpleNamespace(floor=index / 16)
        if index == 6 and between == "method":
            schedule.factor = lambda n: 0.5 if n < 2 else 0.25

    parity(scheduled("factor"), steps=12, captures=6, between=change)


def test_what_a_method_reads_is_written_before():
    """Also to the value that it has, which another writes between calls."""

    def before(schedule):
        schedule.warmup = 5
        schedule.options.floor = 0.5

    def between(program, index):
        (schedule,) = program.watch
        if index % 3 == 1:
            schedule.warmup, schedule.options.floor = 2, 0.0625

    parity(scheduled("factor", before), steps=12, captures=6, between=between)


def test_a_method_of_an_argument():
    """Another object at every call."""

    def make() -> Program:
        made = [Schedule(), Schedule()]
        made[1].warmup, made[1].n = 6, 3

        def step(schedule, x):
            schedule.n += 1
            return x * schedule.factor(schedule.n)

        return Program(step, lambda index: (made[index % 2], torch.randn(2)), (made,))

    parity(make, steps=14, captures=None)


def test_a_function_made_at_every_call():
    def make() -> Program:
        state = types.SimpleNamespace(n=0)

        def step(function, x):
            state.n += 1

            def inner(n):
                return function(n) if n % 2 else 0.5

            return x * function(state.n) * inner(state.n)

        def batch(index):
            bound = index // 2
            return (lambda n: 1.5 if n < bound else 0.25), torch.randn(2)

        return Program(step, batch, (state,))

    parity(make, steps=12, captures=None, whole=False)


def test_a_table_and_a_variable_change():
    def make() -> Program:
        table, state, bound = [1.0, 2.0, 3.0], types.SimpleNamespace(n=0), 3

        def factor(n):
            return table[n % 3] if n > bound else 0.5

        def change(index):
            nonlocal bound
            if index == 5:
                table[1] = 7.0
            if index == 7:
                bound = 20
            if index == 9:
                bound = 3

        def step(x):
            state.n += 1
            return x * factor(state.n)

        return Program(step, lambda index: (torch.ones(2),), (state, change))

    parity(make, steps=13, captures=6, between=lambda program, index: program.watch[1](index))


def test_a_table_that_a_function_changes():
    table = [1.0]

    def make() -> Program:
        table[:] = [1.0]
        state = types.SimpleNamespace(n=0, table=table)

        def factor(n):
            mine = table
            mine += [float(n)]
            return mine[-1] if n % 2 else 0.5

        def step(x):
            state.n += 1
            return x * factor(state.n)

        return Program(step, lambda index: (torch.ones(2),), (state,))

    parity(make, steps=6, captures=None, whole=False)


@pytest.mark.parametrize("kind", ["prints", "raises", "returns an integer", "is a generator"])
def test_other_functions(kind):
    def prints(n):
        print("n", n)
        return 1.0 if n < 3 else 0.5

    def raises(n):
        if n == 4:
            raise ValueError("four")
        return 1.0 if n < 3 else 0.5

    def returns_an_integer(n):
        return 0.5 if n < 3 else 2

    def generates(n):
        yield 1.0 if n < 3 else 0.5

    def is_a_generator(n):
        return next(generates(n))

    function = {each.__name__.replace("_", " "): each for each in (prints, raises, returns_an_integer, is_a_generator)}[
        kind
    ]
    parity(counting(function), steps=7, captures=None, whole=False)


def test_sizes_are_not_computed():
    def rounds(n):
        return n if n % 4 == 0 else n + 4 - n % 4

    def make() -> Program:
        state = types.SimpleNamespace(n=2)

        def step(x):
            state.n += 1
            return x.new_zeros(rounds(state.n)) + x.sum()

        return Program(step, lambda index: (torch.randn(3),), (state,))

    parity(make, steps=9, captures=None)
