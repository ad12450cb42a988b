"""Python's functions of integers and floats that the graph computes: the graph calls them, without a break."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import sidefx_train

INTEGERS = {
    "gcd": lambda n, k: math.gcd(n, 12, k),
    "lcm": lambda n, k: math.lcm(n, k + 1),
    "isqrt": lambda n, k: math.isqrt(n),
    "comb": lambda n, k: math.comb(n, k),
    "perm": lambda n, k: math.perm(n, 2),
    "factorial": lambda n, k: math.factorial(n),
    "bit_length": lambda n, k: n.bit_length() + int.bit_length(k - n),
    "bit_count": lambda n, k: (n + k).bit_count(),
    "pow": lambda n, k: pow(n, k, 7),
    "invert": lambda n, k: ~n,
    "hash": lambda n, k: hash(n) + hash(k - n),
    "frexp": lambda n, k: math.frexp(n + 0.5)[1],
    "as_integer_ratio": lambda n, k: n.as_integer_ratio()[0] * 2,
    "arithmetic around": lambda n, k: math.gcd(n * n - 3 * k, (n << 2) | 8) % 5 + k,
    "one of another": lambda n, k: math.gcd(math.isqrt(n) + 1, math.comb(n + 2, 2)),
}
FLOATS = {
    "hypot": lambda n, k: math.hypot(n, 2.0, k),
    "atan2": lambda n, k: math.atan2(n, k),
    "fmod": lambda n, k: math.fmod(-n, 2.5),
    "copysign": lambda n, k: math.copysign(1.5, k - n),
    "ldexp": lambda n, k: math.ldexp(0.75, n),
    "frexp": lambda n, k: math.frexp(n + 0.5)[0],
    "modf": lambda n, k: sum(math.modf(n / 3 + k)),
    "floor division of floats": lambda n, k: (n + 0.5) // 0.3,
    "remainder of floats": lambda n, k: (n + 0.5) % 0.3,
    "divmod of floats": lambda n, k: divmod(n + 0.5, -0.3)[1],
    "fsum": lambda n, k: math.fsum([n, 0.1, k]),
    "dist": lambda n, k: math.dist((n, 1.0), (2.5, k)),
}
TRUTHS = {
    "isclose": lambda n, k: math.isclose(n, 3.2, abs_tol=0.3),
    "is_integer": lambda n, k: (n / 2).is_integer(),
}
ALL: dict[str, Any] = {
    f"{kind.__name__}: {name}": f for kind, fs in ((int, INTEGERS), (float, FLOATS)) for name, f in fs.items()
}
EXACT = ALL | {f"bool: {name}": f for name, f in TRUTHS.items()}


def stepping(function):
    """Returns a step, and its state, that multiplies a gradient by a function of an integer of the graph."""
    weight = torch.ones(4, requires_grad=True)

    def step(x, number, k):
        weight.grad = None
        (weight * x).sum().backward()
        n = int(number.sum())
        result = function(n, k)
        return weight.grad * result, result, n

    return step


def outcomes(step, calls):
    found = []
    for number, k in calls:
        x = torch.linspace(1.0, 2.0, 4)
        try:
            found.append(step(x, torch.tensor(number), k))
        except (ValueError, TypeError, ArithmeticError) as error:
            found.append((type(error), str(error)))
    return found


def assert_equal(expected, found, exact=True):
    for wanted, made in zip(expected, found, strict=True):
        if isinstance(wanted[0], torch.Tensor):
            torch.testing.assert_close(made[0], wanted[0], rtol=0 if exact else None, atol=0 if exact else None)
            wanted, made = wanted[1:], made[1:]
        assert made == wanted and [*map(type, made)] == [*map(type, wanted)]


CHECKED = {
    *(f"int: {name}" for name in ("gcd", "lcm", "isqrt", "comb", "perm", "factorial")),
    *("int: arithmetic around", "int: one of another", "float: ldexp", "float: fsum", "float: dist"),
}
"""Functions that may raise for some integer of 64 bits, or give one that has more: the graph checks that."""
CALLS = [([value, 1], k) for value, k in ((2, 3), (5, 3), (0, 3), (7, 3), (12, 3), (3, 2), (8, 5))]


@pytest.mark.parametrize("name", EXACT)
def test_the_graph_calls_the_function(name):
    step = stepping(EXACT[name])
    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    assert_equal(outcomes(step, CALLS), outcomes(compiled, CALLS))
    report = compiled.report()
    assert not report.breaks and not report.fallbacks, str(report)
    checked = any("assumes conditions" in note for note in report.captures[0].caveats)
    assert checked == (name in CHECKED)
    assert len(report.captures) <= 3, "one for each number that is found to change"


@pytest.mark.parametrize("name", ["int: arithmetic around", "int: comb", "float: hypot", "float: modf"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.covering(1)
def test_every_backend_does(name, backend):
    step = stepping(ALL[name])
    compiled = sidefx_train.compile(step, backend=backend, keep_slower=True)
    assert_equal(outcomes(step, CALLS), outcomes(compiled, CALLS), exact=False)
    assert not compiled.report().breaks and not compiled.report().fallbacks, str(compiled.report())


LARGE = [([value, 0], k) for value, k in ((5, 3), (2**53 + 1, 3), (-(2**62) - 5, 3), (2**62 + 3, 3), (-7, 3))]
OF_LARGE = {
    "gcd": lambda n, k: math.gcd(n * n * n, 3 * n),
    "between": lambda n, k: math.gcd(n * n + 1, 10**18 + 9),
    "isqrt": lambda n, k: math.isqrt(n * n + 1),
    "pow": lambda n, k: pow(n * n, k, 1000),
    "bit_length": lambda n, k: (n * n * n).bit_length(),
    "hypot": lambda n, k: math.hypot(n, k),
}


@pytest.mark.parametrize("name", OF_LARGE)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.covering(1)
def test_integers_of_more_than_53_bits_are_exact(name, backend):
    step = stepping(OF_LARGE[name])
    compiled = sidefx_train.compile(step, backend=backend, keep_slower=True)
    assert_equal(outcomes(step, LARGE), outcomes(compiled, LARGE), exact=backend == "eager")
    assert not compiled.report().breaks


RAISING = {
    "isqrt": (lambda n, k: math.isqrt(n), ValueError),
    "comb": (lambda n, k: math.comb(n, k), ValueError),
    "factorial": (lambda n, k: math.factorial(n), ValueError),
    "no inverse": (lambda n, k: pow(14, n, 7), ValueError),
    "fmod": (lambda n, k: math.fmod(1.5, n + 3), ValueError),
    "ldexp": (lambda n, k: math.ldexp(1.5, -1000 * n), OverflowError),
    "a float": (lambda n, k: math.gcd(n, k / 2), TypeError),
}


@pytest.mark.parametrize("name", RAISING)
def test_errors_are_eagers(name):
    function, kind = RAISING[name]
    step = stepping(function)
    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    calls = [([value, 0], 3) for value in (5, 6, -3, 4)]
    expected = outcomes(step, calls)
    assert kind in [outcome[0] for outcome in expected]
    assert_equal(expected, outcomes(compiled, calls))


def test_a_large_result_of_64_bits_runs_eagerly():
    step = stepping(lambda n, k: math.factorial(n) // math.factorial(n - 1))
    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    calls = [([value, 0], 3) for value in (5, 6, 7, 25)]
    assert_equal(outcomes(step, calls), outcomes(compiled, calls))
    assert {each.code for each in compiled.report().fallbacks} == {"SFX208"}


def test_a_count_needs_no_check():
    def step(out, target):
        right = (out.argmax(1) == target).sum().item()
        return out * math.gcd(right, 4), right.bit_length(), math.isqrt(right)

    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    for seed in range(3):
        out = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
        target = torch.arange(6) % 3
        found, expected = compiled(out, target), step(out, target)
        assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:]
    assert not compiled.report().breaks
    (capture,) = compiled.report().captures
    assert not any("assumes conditions" in note for note in capture.caveats), "the bounds of a count are known"


def test_the_tensor_is_read_where_its_number_is():
    def step(x, number):
        n = int(number[0])
        number.add_(100)
        return x * math.gcd(n, 12)

    numbers = torch.tensor([8, 1]), torch.tensor([8, 1])
    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    for _ in range(3):
        x = torch.ones(2)
        assert torch.equal(compiled(x, numbers[1]), step(x, numbers[0]))
        assert torch.equal(*numbers)
