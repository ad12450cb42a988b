"""Numbers of NumPy that change from call to call: NumPy computes with them at each call, for one graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sidefx_train
from tests.support.symbolic_numbers import check_two_captures, shown

X = torch.arange(6.0).view(2, 3)
SHARES = [0.3, 0.45, 0.61, 0.7, 0.83, 0.9]
COUNTS = [3, 4, 6, 9, 12, 20]


CASES: dict[str, tuple[Any, list[Any]]] = {
    "made": (lambda t: (X * np.float32(t), X * (np.float32(t) * 0.1), np.float16(t) + 1), SHARES),
    "compared": (lambda t: X * 2 if np.float32(t) > 0.2 else X, SHARES),
    "given": (lambda t: (X * t, t + 0.1, t / 3, -t, abs(t), t**2, f"{t}", round(t, 1)), [*map(np.float32, SHARES)]),
    "largest": (lambda t: max(t, np.float32(0.1)) * 0.1 * X, [*map(np.float32, SHARES)]),
    "largest of two": (lambda t: max(t, t + 1) * 0.1, [*map(np.float32, SHARES)]),
    "converted": (lambda t: (t.item() * X, float(t), int(t * 10), t.astype(np.float64)), [*map(np.float32, SHARES)]),
    "small integers": (lambda n: (X * n, n + 1, n // 2, torch.zeros(n) + 1), [*map(np.int32, COUNTS)]),
    "unsigned": (lambda n: (X * n, n + np.uint8(200)), [*map(np.uint8, COUNTS)]),
    "tensor of a double": (lambda t: (torch.tensor(t) * 1, torch.as_tensor(t) + 1), [*map(np.float64, SHARES)]),
    "tensor of doubles": (lambda t: torch.tensor([t, 1.0]) * 1, [*map(np.float64, SHARES)]),
    "tensor of a float": (lambda t: (torch.tensor(t) * 1, torch.tensor([t, 1]) * 1), [*map(np.float32, SHARES)]),
    "tensor of a half": (lambda t: torch.tensor(t) * 1, [*map(np.float16, SHARES)]),
    "tensor of a long": (lambda n: (torch.tensor(n) * 2, torch.tensor(n + 1)), [*map(np.int64, COUNTS)]),
    "tensor of an integer": (lambda n: torch.tensor(n) * 2, [*map(np.int32, COUNTS)]),
    "items of an array": (lambda t: X * np.array([t, 2 * t], dtype=np.float32).mean(), SHARES),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_their_classes_are_eagers(name):
    check_two_captures(*CASES[name])


def test_comparisons_are_numpys():
    """A float32 equals the number that it was rounded from, which a Python float of it does not."""

    def step(t):
        return X * 2 if t == 0.45 else X

    compiled = sidefx_train.compile(step, backend="eager")
    for value in map(np.float32, [0.3, 0.45, 0.6, 0.45, 0.7, 0.45]):
        assert compiled(value).equal(step(value))


def test_other_values_between_calls():
    """NaN, infinity and numbers of other classes."""

    def step(t):
        return X * (t * np.float32(0.1)), t + 1

    compiled = sidefx_train.compile(step, backend="eager")
    for value in map(np.float32, [0.3, 0.45, np.inf, 0.6, np.nan, 0.7]):
        assert repr(shown(compiled(value))) == repr(shown(step(value)))
    for value in [np.float64(0.7), 0.7, np.float16(0.7), np.int8(2), np.float32(0.1)]:
        assert repr(shown(compiled(value))) == repr(shown(step(value)))


def test_an_attribute_that_a_step_multiplies():
    class Schedule:
        def __init__(self):
            self.rate = np.float32(0.5)

    def of(schedule):
        def step(x):
            schedule.rate *= np.float32(0.9)
            return x * schedule.rate

        return step

    plain, captured = Schedule(), Schedule()
    step, compiled = of(plain), sidefx_train.compile(of(captured), backend="eager")
    for _ in range(6):
        assert compiled(X).equal(step(X))
        assert type(captured.rate) is np.float32 and captured.rate == plain.rate
    assert len(compiled.report().captures) <= 3


def test_numbers_that_change_together_cost_one_capture():
    def of(kept):
        def step(x):
            for name in "abc":
                kept[name] = kept.get(name, 0) + x.sum().numpy().sum()
            return x * 2

        return step

    plain, captured = {}, {}
    step, compiled = of(plain), sidefx_train.compile(of(captured), backend="eager")
    for call in range(6):
        assert compiled(X + call).equal(step(X + call)) and repr(captured) == repr(plain)
    assert len(compiled.report().captures) <= 3


@pytest.mark.parametrize("step", [lambda t: X * (np.float32(t) * 0.1), lambda n: torch.tensor(np.int64(n * 10)) * X])
def test_under_inductor(step):
    compiled = sidefx_train.compile(step, backend="inductor", keep_slower=True)
    for value in SHARES:
        torch.testing.assert_close(compiled(value), step(value))
    report = compiled.report()
    assert len(report.captures) == 2 and not report.breaks and not report.fallbacks, f"{report}"
