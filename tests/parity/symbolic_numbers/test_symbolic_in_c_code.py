"""A counter owned by the step is symbolic from the start: C code of all kinds gets it, with eager's results."""

from __future__ import annotations

import calendar
import collections
import datetime
import fractions
import itertools
import json
import math
import operator
import string
import struct
from typing import Any

import numpy as np
import pytest
import torch

import sidefx_train

CASES: dict[str, Any] = {
    "timedelta": lambda n: datetime.timedelta(seconds=n),
    "date": lambda n: datetime.date(2020, 1, n),
    "times a timedelta": lambda n: (datetime.timedelta(1) * n, datetime.timedelta(days=5) / n),
    "to_bytes": lambda n: n.to_bytes(2, "big"),
    "bit_length": lambda n: (n.bit_length(), n.as_integer_ratio()),
    "parts": lambda n: (n.real, n.imag, n.numerator, n.denominator, n.conjugate()),
    "float methods": lambda n: (float(n).hex(), (n / 2).is_integer(), (n / 2).as_integer_ratio()),
    "bits": lambda n: (n & 1, n | 4, n ^ 1, n << 1, n >> 1, ~n),
    "struct": lambda n: struct.pack("<if", n, n),
    "text": lambda n: ("x".rjust(n), "aaa".replace("a", "b", n), f"{n:04d}|{n:x}", "%03d %r" % (n, n), "ab" * n),
    "join": lambda n: (",".join(map(str, [n, 1])), "".join(str(i) for i in range(n)), "-".join(iter("abc"))),
    "json": lambda n: json.dumps({"a": n, "b": [n / 2, (n, {"c": n})]}, sort_keys=True),
    "math": lambda n: (math.gcd(n, 6), math.comb(5, n), math.isqrt(n), math.hypot(n, 1), math.prod([n, 2])),
    "fraction": lambda n: fractions.Fraction(n, 3),
    "keys": lambda n: ({n: 1, 1: 2}, {n, 1}, {k: k for k in (n, 1)}),
    "containers": lambda n: (collections.deque([1, 2, 3], maxlen=n), list(itertools.islice("abcdef", n))),
    "namedtuple": lambda n: tuple(collections.namedtuple("Pair", "a b")(n, n)),
    "calendar": lambda n: calendar.monthrange(2020, n),
    "slice": lambda n: (slice(n), slice(0, n, None), operator.getitem([1, 2, 3, 4, 5, 6], slice(n))),
    "size": lambda n: (torch.Size([n, 2]), torch.Size([n]) + (1,)),
    "numpy": lambda n: (np.linspace(0, n, 3).tolist(), np.arange(n).tolist(), np.full(2, n).tolist(), np.float32(n)),
}


class State:
    def __init__(self) -> None:
        self.number = 0
        self.result: Any = None


def results(name: str, captured: bool) -> Any:
    state = State()

    def step(x):
        state.number += 1
        state.result = CASES[name](state.number)
        return x + 1

    fn = sidefx_train.compile(step, backend="eager") if captured else step
    found = []
    for _ in range(4):
        fn(torch.ones(1))
        found.append(repr(state.result))
    return found, fn.report() if captured else None


@pytest.mark.parametrize("name", CASES)
def test_c_code_gets_a_number_that_changes(name):
    have, report = results(name, captured=True)
    assert have == results(name, captured=False)[0]
    assert report.replays == 4, str(report)
    assert not report.breaks, str(report)


def test_a_template_is_filled_between_two_parts():
    """Text made of a changing number is known after the step; C code that formats it runs between two parts."""
    CASES["template"] = lambda n: string.Template("$a").substitute(a=n)
    try:
        with pytest.warns(sidefx_train.errors.SideFXWarning, match="SFX106"):
            have, report = results("template", captured=True)
        assert have == results("template", captured=False)[0]
    finally:
        del CASES["template"]
    assert report.replays == 4, str(report)


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"dynamic": False}])
def test_sizes_leave_a_step(options):
    """Regression: a size that may change was written to an outside object as its symbol."""

    def run(captured: bool) -> list[str]:
        state = State()

        def step(x):
            state.result = x.shape, x.shape[:1], slice(0, x.shape[0]), x.stride(), {"size": x.size()}
            print(*x.shape)
            return x * 2, x.shape + (1,)

        fn = sidefx_train.compile(step, backend="eager", fullgraph=True, **options) if captured else step
        return [repr((fn(torch.ones(rows, 3))[1], state.result)) for rows in (4, 5, 6, 4, 1, 8)]

    assert run(captured=True) == run(captured=False)
