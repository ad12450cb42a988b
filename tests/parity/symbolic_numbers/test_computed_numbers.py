"""Functions of C code on a changing number: their results are inputs of the graph, whatever the value is."""

from __future__ import annotations

import functools
import math
import operator
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning

RATES, PLACES = np.linspace(1.0, 0.1, 12), np.arange(12) // 2
TABLE = np.array([2.0, 3.0, 7.0])


class Schedule:
    def __init__(self) -> None:
        self.share, self.step, self.kept = 0.9, 3, np.float64(0.5)
        self.whole = np.int64(1)


def chained(s: Schedule) -> Any:
    beta = np.exp(-s.share * 2) + 0.25
    beta *= 1 - np.cos(np.pi * s.share)
    return beta / (s.step + 1) - beta**2


def chosen(s: Schedule) -> Any:
    beta = np.sqrt(s.share)
    return beta if beta > 0.6 else 2 * beta


def sliced(s: Schedule) -> Any:
    return torch.arange(8.0)[: int(np.ceil(s.step / 3))].sum()


CASES: dict[str, Any] = {
    "ufuncs": lambda s: np.sqrt(s.share) * np.cos(s.share * 3.14) + np.maximum(s.share, 0.5),
    "functions of NumPy": lambda s: np.clip(s.step / 20, 0.2, 0.8) + np.interp(s.share, [0, 0.5, 1], TABLE),
    "math": lambda s: math.gamma(s.share) + math.erf(s.share) * math.hypot(s.share, 1.0) + math.fsum([s.share, 1]),
    "integers": lambda s: math.gcd(s.step, 12) * math.comb(s.step, 2) + math.isqrt(s.step),
    "pairs": lambda s: math.modf(s.share * 7)[1] + divmod(s.share, 0.3)[1] + math.frexp(s.share)[0],
    "scalars of NumPy": lambda s: np.float64(s.share) * 2 + np.float64(0.5) * s.share + s.step * np.float64(0.1),
    "integers of NumPy": lambda s: np.clip(s.step, 4, 6) / 5 + np.int64(s.step) // 2 + np.minimum(s.step, 5) % 3,
    "kept integer": lambda s: torch.arange(8.0)[: s.whole].sum() * s.whole + s.whole % 3,
    "table": lambda s: RATES[s.step] * 2 + torch.arange(9.0)[PLACES[s.step]],
    "chained": chained,
    "chosen": chosen,
    "converted": lambda s: float(np.sin(s.share)) + int(10 * np.sin(s.share)) + round(np.sin(s.share), 2),
    "least": lambda s: max(np.sin(s.share), 0.5) + min(1.0, np.tan(s.share)) + abs(-np.sin(s.share)),
    "kept": lambda s: s.kept * 3 + np.sqrt(s.kept),
    "sliced": sliced,
    "sums": lambda s: sum([np.sin(s.share), np.cos(s.share)]) - np.sin(s.share),
    "math of NumPy's": lambda s: math.sqrt(np.sin(s.share)) + math.floor(3 * np.sin(s.share)),
    "floor": lambda s: s.share // 0.2 + (s.share - 2.0) ** 3.0,
    "methods of NumPy's": lambda s: np.interp(s.step, [0, 12], [1, 40]).round() * np.sqrt(s.share).clip(0.2, 0.8),
    "reductions of NumPy's": lambda s: np.sqrt(s.share).mean() + np.sin(s.share).round(2).max() + s.whole.clip(2, 5),
    "constant tensor": lambda s: float(torch.tensor(0.75)) * s.share,
}


def run(fn: Any, world: Schedule, calls: int = 8) -> tuple[list[Any], list[Any]]:
    results, log = [], []
    for i in range(calls):
        world.share, world.step, world.kept = 0.95 - 0.11 * i, 3 + i, np.float64(0.5 + i)
        world.whole = np.int64(1 + i)
        x = torch.full((3,), 1.5, requires_grad=True)
        loss = fn(x, log)
        loss.sum().backward()
        results.append((loss.tolist(), x.grad.tolist()))
    return results, log


@pytest.mark.parametrize("name", CASES)
def test_results_and_their_classes_are_eagers(name):
    """The number is logged, kept as an attribute and shown, and the graph is captured once more when it changes."""
    world = Schedule()

    def step(x, log):
        value = CASES[name](world)
        world.last = value
        log.append((value, type(value), isinstance(value, float), f"{value:.3f} {value!r} {value}"))
        return x * value

    compiled = sidefx_train.compile(step, backend="eager")
    found, log = run(compiled, world)
    last = world.last
    want, eagers = run(step, world)
    assert found == want
    assert repr(log) == repr(eagers)
    assert type(last) is type(world.last)
    report = compiled.report()
    assert report.replays == 8, str(report)
    assert not report.breaks, str(report)
    decisions = {"chosen": 1, "least": 2, "converted": 1, "floor": 1}.get(name, 0)
    assert len(report.captures) <= 2 + decisions, str(report)


VALUES = {
    "domain": (math.sqrt, [0.5, 0.25, -1.0, 0.75]),
    "pole": (math.gamma, [0.5, 0.25, 0.0, 0.75]),
    "overflow": (lambda x: np.exp(x), [0.5, 0.25, 1e4, 0.75]),
    "invalid": (lambda x: np.log(x), [0.5, 0.25, -1.0, 0.75]),
    "underflow": (lambda x: np.exp(x), [0.5, 0.25, -1e4, 0.75]),
    "division": (lambda x: np.float64(1.0) / x, [0.5, 0.25, 0.0, 0.75]),
    "infinity": (lambda x: np.arctan(x), [0.5, 0.25, math.inf, 0.75, math.nan]),
    "classes": (lambda x: np.add(x, 1), [0.5, 0.25, 2, True, np.float64(3.0), np.float32(0.5), None, "a"]),
    "negative zero": (lambda x: np.arctan2(x, -1.0), [0.5, 0.25, 0.0, -0.0]),
    "large": (lambda x: math.ldexp(1.0, x), [3, 4, 70, 5]),
    "large integer": (lambda x: math.factorial(x), [3, 4, 30, 5]),
}


@pytest.mark.parametrize("name", VALUES)
def test_errors_warnings_and_other_values_are_eagers(name):
    function, values = VALUES[name]
    world = Schedule()

    def step(x, log):
        log.append("before")
        value = function(world.share)
        log.append(value)
        return x * float(value)

    def outcomes(fn):
        log: list[Any] = []
        found = []
        for value in values:
            world.share = value
            with warnings.catch_warnings(record=True) as shown:
                warnings.simplefilter("always")
                warnings.simplefilter("ignore", SideFXWarning)
                try:
                    result = fn(torch.ones(2), log).tolist()
                except (TypeError, ValueError, ArithmeticError) as error:
                    result = [type(error).__name__, str(error)]
            found.append((result, [str(each.message) for each in shown]))
        return repr(found), repr(log)

    assert outcomes(sidefx_train.compile(step, backend="eager")) == outcomes(step)


def test_numpys_settings_decide():
    """Errors that NumPy is told to raise, and warnings of underflows."""
    world = Schedule()

    def step(x):
        return x * float(np.exp(world.share))

    def outcomes(fn):
        found = []
        for value, state in ((1.0, {}), (2.0, {}), (-1e3, {}), (-1e3, {"under": "raise"}), (1e3, {"over": "raise"})):
            world.share = value
            with np.errstate(**state):
                try:
                    found.append(fn(torch.ones(2)).tolist())
                except FloatingPointError as error:
                    found.append(str(error))
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert outcomes(sidefx_train.compile(step, backend="eager")) == outcomes(step)


def test_a_function_of_numpy_made_of_python_code_runs_each_time():
    world, calls = Schedule(), []

    def noted(x):
        calls.append(x)
        return x * 2.0

    made = np.frompyfunc(noted, 1, 1)

    def step(x):
        return x * made(world.share)

    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        for i in range(4):
            world.share = 0.5 + i
            assert compiled(torch.ones(2)).tolist() == [2 * world.share] * 2
    assert calls == [0.5, 1.5, 2.5, 3.5]


def test_a_table_that_the_step_writes_to_afterwards():
    world = Schedule()

    def step(x):
        table = [2.0, 3.0]
        first = np.interp(world.share, [0, 1], table)
        table[0] = 9.0
        return x * first, x * np.interp(world.share, [0, 1], table)

    compiled = sidefx_train.compile(step, backend="eager")
    for i in range(4):
        world.share = 0.2 * i
        found, want = compiled(torch.ones(1)), step(torch.ones(1))
        assert [each.item() for each in found] == [each.item() for each in want]
    assert compiled.report().replays == 4, str(compiled.report())


@pytest.mark.parametrize("how", ["function", "method"])
def test_a_result_that_is_written_into_an_array_of_the_program(how):
    world, kept = Schedule(), np.zeros(())

    def step(x):
        root = np.sqrt(world.share)
        clipped = np.clip(root, 0.0, 1.5, out=kept) if how == "function" else root.clip(0.0, 1.5, out=kept)
        return x * float(clipped)

    compiled = sidefx_train.compile(step, backend="eager")
    for i in range(4):
        world.share = 0.5 + i
        assert compiled(torch.ones(1)).item() == pytest.approx(min(world.share**0.5, 1.5))
        assert float(kept) == min(np.sqrt(world.share), 1.5)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_rate_that_numpy_computes_trains_as_in_eager(backend):
    """The learning rate of each step comes from ``np.cos``; the weights and the optimizer's rate are eager's."""

    def train(captured: bool) -> Any:
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        state = Schedule()
        state.step = 0

        def step(x):
            state.step += 1
            optimizer.param_groups[0]["lr"] = 0.05 * (1 + np.cos(np.pi * state.step / 20))
            loss = net(x).square().mean() * np.clip(state.step / 4, 0.1, 1.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        fn = sidefx_train.compile(step, backend=backend, warmup="now") if captured else step
        losses = [fn(torch.full((3, 4), 0.5)).item() for _ in range(6)]
        rate = optimizer.param_groups[0]["lr"]
        return losses, [p.detach().clone() for p in net.parameters()], repr(rate), fn.report() if captured else None

    losses, weights, rate, report = train(captured=True)
    want, eagers, eagers_rate, _ = train(captured=False)
    assert rate == eagers_rate
    torch.testing.assert_close(losses, want, rtol=1e-5 if backend == "inductor" else 0.0, atol=0.0)
    for found, expected in zip(weights, eagers, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5 if backend == "inductor" else 0.0, atol=1e-7)
    assert report.replays == 6, str(report)


def test_a_counter_that_an_array_keeps():
    """The step writes into an outside array at an index that changes."""

    def train(fn_of):
        world, counts = Schedule(), np.zeros(4)

        def step(x, log):
            counts[world.step % 4] += 1
            return x * counts.sum()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SideFXWarning)
            return run(fn_of(step), world)[0], counts.tolist()

    assert train(lambda step: sidefx_train.compile(step, backend="eager")) == train(lambda step: step)


def test_sorted_by_a_comparison():
    world = Schedule()

    def step(x, log):
        return x * sorted([3, world.step, 5], key=functools.cmp_to_key(lambda a, b: b - a))[1]

    compiled = sidefx_train.compile(step, backend="eager")
    assert run(compiled, world) == run(step, world)
    assert compiled.report().replays == 8, str(compiled.report())


def test_operators_of_the_operator_module_and_in_place():
    world = Schedule()

    def step(x, log):
        value = np.float64(2.0)
        value += world.share
        value = operator.sub(value, world.share * 0.5)
        log.append(value)
        return x * value

    compiled = sidefx_train.compile(step, backend="eager")
    found, log = run(compiled, world)
    want, eagers = run(step, world)
    assert (found, repr(log)) == (want, repr(eagers))
    assert compiled.report().replays == 8, str(compiled.report())


def test_underflows_that_numpy_reports():
    world = Schedule()

    def step(x, log):
        return x * float(np.exp(-world.share))

    with np.errstate(under="warn"):
        compiled = sidefx_train.compile(step, backend="eager")
        assert run(compiled, world) == run(step, world)
    assert len(compiled.report().captures) == 2, str(compiled.report())
