"""Arithmetic of changing numbers where sympy's rules, or code written from its results, are not Python's."""

from __future__ import annotations

import math

import pytest
import torch

import sidefx_train

INF, NAN = math.inf, math.nan
FLOATS = ([1.5, 2.5, INF, -INF, NAN, 0.0, -0.0, 3.0], [2.0, -3.0, 0.0, NAN, INF])
INTEGERS = ([1, 2, 0, -3, 7], [3, 4, 5, 2, 6])


def outcomes(step, values, backend="eager", dtype=torch.float64):
    """Returns what a step returns, or raises, for each value."""
    run = step if backend is None else sidefx_train.compile(step, backend=backend)
    found = []
    for value in values:
        try:
            found.append(repr(run(torch.ones(2, dtype=dtype), value)))
        except (ArithmeticError, ValueError) as error:
            found.append(repr(error))
    return found, None if backend is None else run.report()


def both(fn, values):
    """Compares a function of a number as a factor of a tensor, and as a result with its class."""

    def scaled(x, value):
        return x * fn(value)

    def returned(x, value):
        made = fn(value)
        return x + 1, made, type(made)

    for step in (scaled, returned):
        assert outcomes(step, values)[0] == outcomes(step, values, None)[0]


@pytest.mark.parametrize(
    "fn",
    [
        lambda a: a - INF,
        lambda a: INF - a,
        lambda a: a + INF,
        lambda a: a * INF,
        lambda a: a / INF,
        lambda a: a % INF,
        lambda a: a % -INF,
        lambda a: a // INF,
        lambda a: a**INF,
        lambda a: NAN + a,
        lambda a: sum([a, INF]),
        lambda a: math.copysign(INF, a),
        lambda a: math.pow(a, INF),
        lambda a: math.atan2(INF, a),
    ],
)
@pytest.mark.parametrize("values", [*FLOATS, *INTEGERS])
def test_beside_infinity(fn, values):
    both(fn, values)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a: a * 0,
        lambda a: 0.0 * a,
        lambda a: a - a,
        lambda a: a + a - a,
        lambda a: a == a,
        lambda a: a != a,
        lambda a: a % 1,
        lambda a: a**0,
        lambda a: math.prod([a, INF]),
    ],
)
@pytest.mark.parametrize("values", FLOATS)
def test_numbers_that_cancel(fn, values):
    """Sympy takes symbols for finite numbers: ``x * 0`` and ``x - x`` are zero, ``x == x`` is true."""
    both(fn, values)


@pytest.mark.parametrize(
    "values", [[1.5, 2.5, 0.0, -0.0, 0.0], [1.5, 2.5, -0.0, 0.0, -0.0], [0.0, -0.0, 1.0], [-0.0, 1.0, 2.0, 0.0, -0.0]]
)
@pytest.mark.parametrize("fn", [lambda a: a, lambda a: -a, lambda a: a * 2, lambda a: a - 1.0 + 1.0])
def test_the_sign_of_a_zero_in_c_code(fn, values):
    def step(x, value):
        text = fn(value).hex()
        return x + 1, text, type(text)

    assert outcomes(step, values)[0] == outcomes(step, values, None)[0]


@pytest.mark.parametrize(
    "step",
    [
        lambda x, b: x * 2 if b % 1 else x - 1,
        lambda x, b: x * 2 if b % 2.0 > 1 else x - 1,
        lambda x, b: x * 2 if 7.5 % b > 1.25 else x - 1,
        lambda x, b: x * 2 if math.fmod(b, 1.0) else x - 1,
        lambda x, b: x * (b - 2.5 and b),
    ],
)
def test_decisions_on_remainders(step):
    """Torch bounds the remainder of a float as if it were an integer: of 1 it is 0."""
    values = [1.0, 0.5, 2.0, 1.5, 3.25, -0.75, 2.5, 0.25]
    assert outcomes(step, values)[0] == outcomes(step, values, None)[0]


def test_a_negative_zero_that_decides():
    def step(x, a):
        return x * (a and 2.0)

    def of_a_remainder(x, a):
        return x * (a % -2.5 and 1.0)

    for run, values in (
        (step, [-7.0, 2.0, -0.0, 0.0, -0.0, 1.0]),
        (of_a_remainder, [1.0, 2.0, -2.5, -5.0, 3.0, -2.5]),
    ):
        assert outcomes(run, values)[0] == outcomes(run, values, None)[0]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    "step",
    [
        lambda x, b: x * ((-7) ** b),
        lambda x, b: x * ((-1) ** b),
        lambda x, b: x * ((-2.0) ** b),
        lambda x, b: x * (-0.5) ** b,
        lambda x, b: x * (2**b) - (-b) ** 3,
        lambda x, b: (x * ((-3) ** b), (-3) ** b, b**b),
        lambda x, b: torch.full((2,), (-1) ** b),
    ],
)
@pytest.mark.covering(1)
def test_powers(step, backend, caplog):
    """The minus of a negative base belongs to it: ``-7 ** b`` in the code of a graph is ``-(7 ** b)``."""
    found, report = outcomes(step, [3, 4, 5, 2, 6, 7], backend)
    assert found == outcomes(step, [3, 4, 5, 2, 6, 7], None)[0]
    assert len(report.captures) == 2 and not report.fallbacks and not report.breaks, str(report)
    assert not caplog.records


@pytest.mark.parametrize("name", ["__add__", "__mul__", "__pow__", "__lt__", "__eq__", "__and__", "__mod__"])
def test_truth_values_beside_changing_integers(name, caplog):
    """``False ** b`` is an integer; torch logs that it cannot compare a symbol with a truth value."""

    def step(x, b):
        made = getattr(int, name)(b, True), False**b, True + b, b == False, True > b  # noqa: E712
        made += (b != 2) | b, b & (b > 1), (b != 3) & (b > 0)
        return x + 1, made, [isinstance(each, bool) for each in made]

    found, report = outcomes(step, [3, 4, 0, 1, 2])
    assert found == outcomes(step, [3, 4, 0, 1, 2], None)[0]
    assert not caplog.records and not report.fallbacks


def refused(fn, *args):
    try:
        return fn(*args)
    except TypeError as error:
        return str(error)


ROUNDED = {
    "of the graph": lambda x, n: (round(int(x.sum().item()), -1), round(x.long().sum().item(), ndigits=-2)),
    "a size": lambda x, n: (round(x.shape[0], -1), round(number=3 * x.shape[0], ndigits=-1)),
    "large": lambda x, n: (round(n + 2**62, -1), round(-n - 2**62, ndigits=-2), round(n + 2**62, 1)),
    "digits that are no integer": lambda x, n: refused(round, n, 1.0),
}


@pytest.mark.parametrize("rounded", ROUNDED.values(), ids=ROUNDED)
def test_integers_are_rounded_to_tens(rounded) -> None:
    def step(x, n):
        return x.sum(), rounded(x, n)

    compiled = sidefx_train.compile(step, backend="eager")
    for n in (15, 25, -25, 116, -44, 5):
        x = torch.full((6 + abs(n),), float(n))
        assert compiled(x, n)[1] == rounded(x, n)
    assert compiled.report().fallback_count == 0, str(compiled.report())
