"""``min`` and ``max`` of changing numbers are computed when the step runs, in the order of their operands."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import sidefx_train


class State:
    n = 0
    rate = 0.75


def decay_ramp(state, x):
    state.n += 1
    decay = min(0.8, (1 + state.n) / (10 + state.n))
    return x * decay + (1 - decay), decay


def several(state, x):
    state.n += 1
    return x + min(state.n, 7, 2 * state.n - 3), max(3, state.n)


def outside_float(state, x):
    state.n += 1
    return x * max(0.0, state.rate), x * min(state.rate, 0.5), max(state.rate, 0.0)


def branches_on_it(state, x):
    state.n += 1
    factor = max(0.25, 1.0 - state.n / 10)
    return (x * factor if factor > 0.3 else x - factor), factor


def of_other_types(state, x):
    """The result is an ``int`` or a ``float``: it is decided by a guard."""
    state.n += 1
    factor = min(1, state.n / 4)
    return x * factor, factor


def of_sizes(state, x):
    return x[: min(x.shape[0], 3)] * max(x.shape[0], 2)


RATES = (0.75, 0.5, 0.25, -0.0, 0.0, -1.0, 1e308, 1e-320, 0.3)


def run(step, wrap, rates, sizes=None):
    state, step = State(), wrap(step)
    shown = []
    for index, rate in enumerate(rates):
        state.rate = rate
        shown.append(repr(step(state, torch.arange(float(sizes[index] if sizes else 3)) - 1)))
    return shown, step


@pytest.mark.parametrize(
    "step, captures", [(decay_ramp, 1), (several, 1), (outside_float, 2), (branches_on_it, 2), (of_other_types, 2)]
)
def test_which_one_is_no_guard(step, captures):
    rates = RATES * 6
    want, _ = run(step, lambda fn: fn, rates)
    got, compiled = run(step, lambda fn: sidefx_train.compile(fn, backend="eager"), rates)
    assert got == want
    first = 1  # the first call finds no attribute of the instance
    report = compiled.report()
    assert len(report.captures) <= captures + first and not report.fallback_count, str(report)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(special):
    rates = (0.75, 0.5, 0.25, special, 0.25, special, 0.5)
    want, _ = run(outside_float, lambda fn: fn, rates)
    got, compiled = run(outside_float, lambda fn: sidefx_train.compile(fn, backend="eager"), rates)
    assert got == want and not compiled.report().fallback_count


def test_sizes_are_compared_in_the_capture():
    sizes = (2, 4, 5, 3, 6, 2)
    want, _ = run(of_sizes, lambda fn: fn, RATES[:6], sizes)
    got, _ = run(of_sizes, lambda fn: sidefx_train.compile(fn, backend="eager"), RATES[:6], sizes)
    assert got == want


def test_under_inductor():
    want, _ = run(decay_ramp, lambda fn: fn, RATES)
    got, compiled = run(decay_ramp, lambda fn: sidefx_train.compile(fn), RATES)
    assert got == want and len(compiled.report().captures) <= 2


def perplexity(x):
    return x * min(x.sum().item(), 20), math.exp(min(x.sum().item(), 20))


def at_least(x):
    return x * max(x.sum().item(), 1), max(x.sum().item(), 1)


def integer_first(x):
    return x * min(20, x.sum().item()), max(1, x.sum().item()), max(0, min(x.sum().item(), 100))


@pytest.mark.parametrize("step", [perplexity, at_least, integer_first], ids=lambda step: step.__name__)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_of_a_number_of_the_graph_and_an_integer(step, backend):
    """The result is assumed to be the float; where it is the integer, the step runs eagerly."""
    sums, others = (3.0, 4.5, 19.5, 1.5, 2.0), (50.0, -2.0, 1.0, 20.0, math.nan, 3.0, -math.inf)
    compiled = sidefx_train.compile(step, backend=backend, keep_slower=True)
    for value in sums:
        x = torch.tensor([value - 1.0, 1.0])
        assert repr(compiled(x)) == repr(step(x))
    report = compiled.report()
    assert len(report.captures) == 1 and not report.breaks and not report.fallbacks, str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        for value in others:
            x = torch.tensor([value - 1.0, 1.0])
            assert repr(compiled(x)) == repr(step(x)), value
