"""A changing number together with numbers of other classes: enumerations, user classes, numpy's."""

from __future__ import annotations

import collections
import enum
import math
import operator
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import sidefx_train


class Month(enum.IntEnum):
    JANUARY = 1
    FEBRUARY = 2


class Flags(enum.IntFlag):
    A = 1
    B = 2


class Whole(int):
    pass


class Own(int):
    def __eq__(self, other: object) -> Any:
        return "eq", int.__eq__(self, other)

    __hash__ = int.__hash__

    def __add__(self, other: Any) -> Any:
        return "add", super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        return "radd", super().__radd__(other)

    def __lt__(self, other: Any) -> Any:
        return "lt", super().__lt__(other)


class OwnFloat(float):
    def __mul__(self, other: Any) -> Any:
        return "mul", float.__mul__(self, other)

    __rmul__ = __mul__


def matched(n: int) -> str:
    match n:
        case Month.JANUARY:
            return "January"
        case Month.FEBRUARY:
            return "February"
    return "later"


def removed(n: int) -> list[int]:
    months = [Month.JANUARY, Month.FEBRUARY, 3]
    if n in months:
        months.remove(n)
    return months


FEBRUARY = Month.FEBRUARY
CASES: dict[str, Any] = {
    "equality": lambda n: (n == FEBRUARY, FEBRUARY == n, n != FEBRUARY, n == Whole(2), (n == FEBRUARY) and "yes"),
    "order": lambda n: (n < FEBRUARY, FEBRUARY <= n, max(n, FEBRUARY), sorted([n, FEBRUARY, 0])),
    "arithmetic": lambda n: (n + FEBRUARY, FEBRUARY - n, n / FEBRUARY, divmod(n, FEBRUARY), n**FEBRUARY, FEBRUARY << n),
    "sums": lambda n: (sum([n, FEBRUARY]), sum([FEBRUARY, n], FEBRUARY), pow(n, FEBRUARY, 5), abs(-n - FEBRUARY)),
    "flags": lambda n: (n & Flags.B, Flags.B & n, n | Flags.B, Flags.B | n),
    "among": lambda n: (n in (Month.JANUARY, FEBRUARY), n in [FEBRUARY], n in range(FEBRUARY, 9)),
    "found": lambda n: ([Month.JANUARY, FEBRUARY].count(n), operator.countOf([FEBRUARY, 2, Whole(2)], n)),
    "deque": lambda n: collections.deque([FEBRUARY, 2]).count(n),
    "containers": lambda n: ((n, 1) == (FEBRUARY, Month.JANUARY), {"a": n} == {"a": FEBRUARY}, [n, 0] < [FEBRUARY, 1]),
    "keys": lambda n: ({1: "a", FEBRUARY: "b"}.get(n), len({n, FEBRUARY})),
    "match": matched,
    "removed": removed,
    "text": lambda n: f"{n + FEBRUARY} {n == FEBRUARY} {n * Whole(3):>5}",
    "floats": lambda n: (float(n) == FEBRUARY, n * 1.0 + FEBRUARY, n * 0.5 == Month.JANUARY),
    "math": lambda n: (math.gcd(n, FEBRUARY), math.hypot(n, FEBRUARY)),
    "own methods": lambda n: (n == Own(2), Own(2) == n, n + Own(3), Own(3) + n, n < Own(2), Own(2) < n, n * Own(2)),
    "own floats": lambda n: (n * OwnFloat(2.5), OwnFloat(2.5) * n, n + OwnFloat(2.5), n == OwnFloat(2.0)),
    "numpy": lambda n: (n * np.float64(2), n == np.int64(2), np.int64(2) == n, np.int64(3) + n, n < np.float32(2)),
    "slots": lambda n: (int.__eq__(n, 2), (2).__add__(n), (2).__rsub__(n), (2.5).__mul__(n), (2).__add__(n * 0.5)),
    "slots of members": lambda n: (n.__eq__(FEBRUARY), FEBRUARY.__eq__(n), int.__lt__(FEBRUARY, n)),
}


class State:
    def __init__(self) -> None:
        self.number = 0


def results(name: str, captured: bool) -> Any:
    state, found = State(), []

    def step(x):
        state.number += 1
        found.append(CASES[name](state.number))
        return x * state.number

    fn = sidefx_train.compile(step, backend="eager") if captured else step
    values = [fn(torch.ones(2)).tolist() for _ in range(4)]
    return repr(found), values, fn.report() if captured else None


@pytest.mark.parametrize("name", CASES)
def test_a_symbolic_number_with_a_number_of_another_class(name):
    found, values, report = results(name, captured=True)
    assert (found, values) == results(name, captured=False)[:2]
    assert report.replays == 4, str(report)
    assert not report.breaks, str(report)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_size_with_a_member_of_an_enumeration(dynamic):
    def step(x, log):
        log.append((x.shape[0] == Month.FEBRUARY, Month.FEBRUARY < x.shape[0], x.shape[0] in (1, FEBRUARY)))
        return x.sum()

    def run(fn):
        log: list[Any] = []
        for size in (3, 2, 4, 5):
            fn(torch.ones(size), log)
        return log

    assert run(sidefx_train.compile(step, backend="eager", dynamic=dynamic)) == run(step)


def test_symbolic_numbers_are_torchs_again_after_a_capture():
    from torch.fx.experimental import sym_node

    usual = sym_node.to_node
    seen = []

    def step(x):
        seen.append(sym_node.to_node is usual)
        return x + 1

    results("equality", captured=True)
    sidefx_train.compile(step, backend="eager")(torch.ones(2))
    assert sym_node.to_node is usual


class Tagged(int):
    pass


class Text(str):
    pass


ONE, NEXT, HALF = Whole(1), Text("b"), OwnFloat(0.5)
OUTSIDE: dict[str, Any] = {
    "replace": lambda: "abab".replace("a", "c", ONE),
    "round": lambda: round(2.3456, ONE),
    "repeat": lambda: "a" * ONE + NEXT,
    "substituted": lambda: re.sub("a", "b", "aaa", count=ONE),
    "range": lambda: (list(range(ONE)), [1, 2, 3][ONE], max(ONE, 0)),
    "text": lambda: f"{ONE} {HALF:.2f} {NEXT}",
    "kind": lambda: (isinstance(ONE, int), type(ONE).__name__, ONE == 1, math.floor(HALF)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_c_code_gets_an_outside_number_of_a_derived_class(name):
    """Regression: it stopped every step that calls ``re.sub`` under Python 3.13, whose ``count`` is such a number."""

    def step(x, log):
        log.append(OUTSIDE[name]())
        return x + 1

    def run(fn):
        log: list[Any] = []
        for _ in range(3):
            fn(torch.ones(2), log)
        return repr(log)

    want = run(step)  # this call fills the cache of compiled patterns
    compiled = sidefx_train.compile(step, backend="eager")
    assert run(compiled) == want
    assert compiled.report().replays == 3, str(compiled.report())
    assert not compiled.report().breaks, str(compiled.report())


def test_the_namespace_of_a_number_stays_the_same_dict():
    """Regression: a step that returned ``vars()`` of a constant returned a copy."""

    def run(compiled: bool) -> list[Any]:
        tagged, log = Tagged(3), []
        tagged.note = 0

        def step(x, log):
            tagged.note += 1
            log.append(vars(tagged))
            tagged.more = tagged.note * 2
            return x * tagged.note

        fn = sidefx_train.compile(step, backend="eager") if compiled else step
        for _ in range(3):
            fn(torch.ones(2), log)
        assert all(each is vars(tagged) for each in log)
        return log

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        assert run(compiled=True) == run(compiled=False)


class Sized:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        return iter(range(self.size))


def test_a_length_that_changes_is_no_hint_for_c_code():
    """Regression: ``list()`` of an object whose length is a changing number raised, and the step ran eagerly."""

    def run(captured: bool) -> Any:
        sized, log = Sized(0), []

        def step(x):
            sized.size += 1
            log.append((len(sized), list(sized), tuple(sized), sorted(sized, reverse=True)))
            return x + 1

        fn = sidefx_train.compile(step, backend="eager") if captured else step
        for _ in range(4):
            fn(torch.ones(2))
        return log, fn.report() if captured else None

    log, report = run(captured=True)
    assert log == run(captured=False)[0]
    assert report.replays == 4, str(report)
