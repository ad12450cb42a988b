"""Strings, bytes, decimals and time spans made of a number that changes: one graph for all values."""

from __future__ import annotations

import struct
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sidefx_train
from tests.support.symbolic_numbers import check_two_captures, shown

X = torch.arange(3.0)
COUNTS = [3, 5, 7, 12, 150, 77777]
SHARES = [0.3, 0.45, 0.615, 2.5, 77.7]


CASES: dict[str, tuple[Any, list[Any]]] = {
    "length of a string": (lambda n: X * len(str(n)), COUNTS),
    "digits": (lambda n: (X * int(str(n)[::-1]), str(n).zfill(5), X * ord(str(n)[0])), COUNTS),
    "formatted": (lambda n: (X * len(f"{n:03d}/{n + 1}"), X * len("%d of %d" % (n, 2 * n)), f"{n:>9}"), COUNTS),
    "stripped": (lambda t: (X * 2, f"{t:.3f}".rstrip("0"), len(repr(t))), SHARES),
    "bytes": (lambda n: (X * n.to_bytes(4, "little")[0], n.to_bytes(4, "big"), X * len(n.to_bytes(3, "big"))), COUNTS),
    "bytes and back": (lambda n: X * int.from_bytes(n.to_bytes(4, "big"), "little"), COUNTS[:4]),
    "packed": (lambda t: (X * struct.unpack("<i", struct.pack("<f", t))[0], struct.pack("<d", t)), SHARES),
    "time": (lambda t: (X * timedelta(seconds=t).total_seconds(), str(timedelta(seconds=t))), SHARES),
    "minutes": (lambda n: (timedelta(seconds=n) / timedelta(minutes=1) * X, timedelta(days=n).days), COUNTS),
    "absolute of a complex number": (lambda t: (X * abs(complex(t, 1)), complex(t, 2).imag, complex(t) * 2j), SHARES),
    "string of NumPy's number": (lambda t: X * len(str(t)), [*map(np.float32, SHARES)]),
}


@pytest.mark.parametrize("name", CASES)
def test_one_graph_for_all_values(name):
    check_two_captures(*CASES[name])


def test_decisions_are_guarded():
    def step(n):
        y = X * 2 if str(n) == "7" else X
        return y + 1 if "1" in str(n) else y

    compiled = sidefx_train.compile(step, backend="eager")
    for value in [3, 7, 5, 12, 7, 70, 1]:
        assert compiled(value).equal(step(value))


def test_a_decimal_of_a_counter():
    """Each call computes with the decimal context of that moment."""
    from decimal import localcontext

    def step(state):
        state.n += 1
        third = Decimal(state.n) / 3
        state.text = f"{third}"
        return X * float(third), third

    compiled, plain, captured = sidefx_train.compile(step, backend="eager"), *(SimpleNamespace(n=1) for _ in range(2))
    for precision in [28, 28, 5, 28, 3, 28]:
        with localcontext() as context:
            context.prec = precision
            assert shown(compiled(captured)) == shown(step(plain)) and captured == plain
    report = compiled.report()
    assert len(report.captures) == 1 and not report.breaks, f"{report}"


@pytest.mark.parametrize(
    ("step", "values"),
    [
        (lambda n: X * n.to_bytes(1, "little")[0], [3, 4, 5, 300, 6]),
        (lambda t: X * timedelta(days=t).days, [3, 4, 1e30, 5]),
        (lambda t: X * len(str(t)), [0.3, 0.4, float("nan"), 0.5, float("inf"), True, "abc", None]),
        (lambda n: X * int(str(n)[1:]), [12, 134, 5, 66]),
    ],
)
def test_errors_and_other_values_are_eagers(step, values):
    def outcome(fn, value):
        try:
            return shown(fn(value))
        except (ValueError, OverflowError) as error:
            return repr(error)

    compiled = sidefx_train.compile(step, backend="eager")
    for value in values:
        assert outcome(compiled, value) == outcome(step, value)


@pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")
def test_a_complex_factor_runs_natively():
    def step(t):
        return X * complex(t, 1)

    compiled = sidefx_train.compile(step, backend="eager")
    for value in SHARES:
        assert compiled(value).equal(step(value))
    assert len(compiled.report().captures) <= 3
