"""Arithmetic with changing numbers that may raise: the error is raised in the call to which it belongs."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning

OPERATIONS = {
    "floor division": lambda n, f: 3 // n,
    "remainder": lambda n, f: 3 % n,
    "division": lambda n, f: 3 / n,
    "of a float by an int": lambda n, f: f / n,
    "floor division by a float": lambda n, f: 3 // f,
    "division by a float": lambda n, f: 3 / f,
    "remainder of a float": lambda n, f: 3 % f,
    "by itself": lambda n, f: n // n,
    "divmod": lambda n, f: divmod(7, n),
    "in place": lambda n, f: _in_place(n),
    "power of zero": lambda n, f: n**-1,
    "power of zero, a float": lambda n, f: f**-1,
    "negative exponent": lambda n, f: (n - 1) ** (1 - n),
    "modular power": lambda n, f: pow(2, 3, n),
    "shift": lambda n, f: 1 << (n - 1),
    "shift to the right": lambda n, f: n >> (n - 1),
    "sqrt": lambda n, f: math.sqrt(n - 1),
    "log": lambda n, f: math.log(n),
    "log of a float": lambda n, f: math.log(f),
    "log to a base": lambda n, f: math.log(3.5, n),
    "log2": lambda n, f: math.log2(n),
    "log1p": lambda n, f: math.log1p(f - 1),
    "acos": lambda n, f: math.acos(f - 1),
    "exp": lambda n, f: math.exp(n * 300),
    "cosh": lambda n, f: math.cosh(f * 300),
    "pow": lambda n, f: math.pow(f, -1.5),
    "int of infinity": lambda n, f: int(f * 1e308 * 10),
    "int of a large float": lambda n, f: int(f * 1e30),
    "range": lambda n, f: range(0, 3, n),
}


EAGERLY = {"int of infinity", "int of a large float", "floor division by a float"}
"""Some calls of these run eagerly, with a reason: torch's symbolic arithmetic cannot evaluate or trace them."""


def _in_place(n):
    value = 7
    value //= n
    return value


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.every(3)
def test_the_error_of_one_call(name: str, backend: Any, used: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Whether or not the result is used; nothing else is printed."""
    operation = OPERATIONS[name]

    def step(x, n, f):
        try:
            found = operation(n, f)
        except (ArithmeticError, ValueError) as error:
            return x, f"{type(error).__name__}: {error}"
        return x + 1, found if used else "fine"

    compiled = sidefx_train.compile(step, backend=backend)
    for n in (4, 3, 2, 0, 1, 0, 5):
        (x, want), (y, got) = step(torch.ones(2), n, float(n)), compiled(torch.ones(2), n, float(n))
        assert torch.equal(x, y) and type(got) is type(want)
        assert got == pytest.approx(want, rel=1e-12) if isinstance(want, float) else got == want, f"n={n}"
    shift = name.startswith("shift") and torch.__version__ < "2.13"  # it cannot shift by a symbolic number
    assert shift or name in EAGERLY or not compiled.report().fallbacks, str(compiled.report())
    assert not capfd.readouterr().err


UNKNOWN = {
    "a number of the graph by one that changes": lambda t, n: int(t.sum()) // n,
    "a float of the graph by one that changes": lambda t, n: t.sum().item() / n,
    "by a number of the graph": lambda t, n: 5 // (t.sum().int().item() * n),
    "remainder": lambda t, n: 5 % (int(t.sum()) * n),
    "by a float of the graph": lambda t, n: 1.0 / (t.sum().item() * n),
    "exp": lambda t, n: math.exp(t.sum().item() * 500 * n),
    "log": lambda t, n: math.log(t.sum().item() * n),
    "sqrt": lambda t, n: math.sqrt(t.sum().item() * n - 1),
    "power": lambda t, n: (0 * n) ** (1 - t.sum().int().item()),
    "shift": lambda t, n: 1 << (n - int(t.sum())),
}


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.covering(1)
def test_numbers_that_exist_only_when_the_graph_runs(name: str, backend: Any, used: bool) -> None:
    """The error of an operation is not skipped, and C++ does not divide by zero."""
    operation = UNKNOWN[name]

    def step(x, n):
        try:
            found = operation(x, n)
        except (ArithmeticError, ValueError) as error:
            return x, f"{type(error).__name__}: {error}"
        return x + 1, found if used else "fine"

    compiled = sidefx_train.compile(step, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        for filling, n in ((0.5, 4), (1.0, 3), (0.5, 2), (0.5, 0), (0.5, 1), (0.0, 2), (1.5, 5)):
            x = torch.full((2,), filling)
            (a, want), (b, got) = step(x, n), compiled(x, n)
            assert torch.equal(a, b) and type(got) is type(want)
            assert got == pytest.approx(want, rel=1e-6) if isinstance(want, float) else got == want, (filling, n)
    assert compiled.report().replays


def _norms(t):
    total = 0.0
    for each in t:
        total += each.norm().item() ** 2
    return total**0.5


def _written(t):
    norm = t.norm()
    norm.view(1).sub_(100.0)
    return norm.item() ** 0.5


BOUNDED = {
    "square": (lambda t: t[0].item() ** 2, True),
    "square of a power": (lambda t: (t[0].item() ** 2) ** 3, True),
    "power that may overflow": (lambda t: t[0].item() ** 9, False),
    "square of a double": (lambda t: t.double()[0].item() ** 2, False),
    "root of squares": (_norms, True),
    "root of a number that may be negative": (lambda t: t[0].item() ** 0.5, False),
    "root of what was written": (_written, False),
    "sqrt": (lambda t: math.sqrt(t.square().mean().item() + t.abs().sum().item()), True),
    "sqrt of an error": (lambda t: math.sqrt(torch.nn.functional.mse_loss(t, t * 2).item()), True),
    "divisor": (lambda t: 3 / (t.norm().item() + 1e-6) / (t[0].item() ** 2 + 1), True),
    "divisor that may be zero": (lambda t: 3 / t.norm().item(), False),
    "log": (lambda t: math.log(t.exp().sum().item() + 1e-3), True),
    "largest": (lambda t: max(each.item() for each in t) - min([each.item() for each in t]), True),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.covering(1)
def test_bounds_of_numbers_of_the_graph(name: str, backend: Any) -> None:
    """Arithmetic that cannot raise, whatever the graph computes, needs no break."""
    operation, whole = BOUNDED[name]

    def step(t):
        try:
            return t + 1, operation(t)
        except (ArithmeticError, ValueError, TypeError) as error:
            return t, f"{type(error).__name__}: {error}"

    compiled = sidefx_train.compile(step, backend=backend)
    tensors = [[1.5, -2.0, 0.25], [-3.0, 1.0, 2.0], [0.0, 0.0, 0.0], [3e38, -3e38, 1.0], [1e-40, 0.0, -0.0]]
    for values in (*tensors, [math.inf, 1.0, 2.0], [1.0, math.nan, 2.0], [math.nan, 1.0, -math.inf], tensors[0]):
        t = torch.tensor(values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SideFXWarning)
            (a, want), (b, got) = step(t), compiled(t)
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)) and type(got) is type(want), (want, got)
        exact = backend != "inductor" or not isinstance(want, float)
        assert repr(got) == repr(want) if exact else got == pytest.approx(want, rel=1e-6, nan_ok=True), values
    report = compiled.report()
    assert not (whole and (report.breaks or report.fallback_count)), f"{report}"
    assert whole or report.breaks or "SFX208" in {record.code for record in report.fallbacks}, f"{report}"


def test_an_integer_that_overflows_may_be_negative():
    """The absolute value of the least integer is itself: nothing happens after the division by zero."""
    total = torch.zeros(())

    def step(x):
        quotient = 1 / (x.abs().max().item() + 2**31)
        total.add_(1)
        return quotient

    compiled = sidefx_train.compile(step, backend="aot_eager", warmup="now")
    plain, least = torch.tensor([3, -5], dtype=torch.int32), torch.full((2,), -(2**31), dtype=torch.int32)
    assert compiled(plain) == 1 / (5 + 2**31)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        compiled(least)
    assert total.item() == 1


LOGGED = {
    "inverse": lambda v: 1 / v,
    "exp": lambda v: math.exp(v),
    "log": lambda v: math.log(v),
    "decibels": lambda v: 20 * math.log10(1.0 / math.sqrt(v)),
    "percent": lambda v: int(100 * v),
    "rounded": lambda v: (round(v, 3), round(v), f"{v:.3f} {math.exp(v):.1f}"),
    "up and down": lambda v: (math.floor(10 * v), math.ceil(v), v % 0.1),
    "root": lambda v: v**0.5,
    "of one more": lambda v: (math.log1p(v), math.expm1(v), math.erf(v)),
}
SCALES = {
    "inverse": lambda v: 1 / v,
    "exp": lambda v: math.exp(-v),
    "log": lambda v: math.log(v),
    "decibels": lambda v: math.log10(v),
    "percent": lambda v: int(100 * v),
    "rounded": lambda v: round(v, 1),
    "root": lambda v: math.sqrt(v) / v,
    "down": lambda v: math.floor(10 * v),
}
TRAINED = {
    f"{name}, {use}": (call, use) for use, calls in (("kept", LOGGED), ("used", SCALES)) for name, call in calls.items()
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.covering(1)
def test_arithmetic_with_a_loss_before_its_backward(name: str, backend: Any) -> None:
    """It is no break; where it raises, or cannot be computed, weights are eager's."""
    call, use = TRAINED[name]

    def history(wrap):
        weight = torch.nn.Parameter(torch.tensor([0.5, -1.0]))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        kept, found = [], []

        def step(x):
            loss = (x * weight).square().sum()
            number = call(loss.item())
            kept.append(number)
            optimizer.zero_grad()
            (loss * number if use == "used" else loss).backward()
            optimizer.step()

        step = wrap(step)
        inputs = [*(torch.tensor([1.0, 0.1 * i]) for i in range(5)), torch.zeros(2), torch.tensor([1.0, 2.0])]
        for x in (*inputs, torch.tensor([100.0, 0.0]), torch.tensor([1.0, -1.0])):
            try:
                step(x)
            except (ArithmeticError, ValueError) as error:
                found.append(repr(error))
            found.append(weight.detach().clone())
        return step, kept, found

    _, wanted_numbers, wanted = history(lambda step: step)
    step, numbers, got = history(lambda step: sidefx_train.compile(step, backend=backend, keep_slower=True))
    assert [type(each) for each in got] == [type(each) for each in wanted]
    for one, other in zip(got, wanted, strict=True):
        if isinstance(one, str):
            assert one == other
        else:
            torch.testing.assert_close(
                one, other, rtol=0 if backend == "eager" else 1e-5, atol=0 if backend == "eager" else 1e-5
            )
    if backend == "eager":
        assert numbers == wanted_numbers
    report = step.report()
    assert len(report.captures) == 1 and not report.breaks, str(report)
    assert report.replays >= 6 and {record.code for record in report.fallbacks} <= {"SFX208"}, str(report)
