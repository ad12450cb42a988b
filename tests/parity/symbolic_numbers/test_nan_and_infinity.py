"""Floats that change from call to call, including infinity and NaN: as Python values and from tensors."""

from __future__ import annotations

import datetime
import math
import statistics

import numpy as np
import pytest
import torch

import sidefx_train
from sidefx_train.errors import UnfinishedError

OUT_OF_TENSORS = {
    "divided": lambda v: 1 / v,
    "a logarithm": math.log,
    "an integer": int,
    "rounded": round,
    "rounded to a digit": lambda v: round(v, 1),
    "the floor": math.floor,
    "the ceiling": math.ceil,
    "truncated": math.trunc,
    "divided with floor": lambda v: (v // 0.5, 1.5 // v),
    "a remainder": lambda v: 2 % v,
    "a power": lambda v: v**0.5,
    "of infinity": lambda v: (min(v, math.inf), v < math.inf, v * -math.inf),
    "of NaN": lambda v: (v == math.nan, v + math.nan),
    "as an integer in a text": lambda v: "%d" % v,  # noqa: UP031
    "in texts": lambda v: (f"{v:.2f}", "%s %.1f" % (v, v), str(v)),  # noqa: UP031
    "an index": lambda v: [1, 2, 3, 4, 5, 6][int(v)],
    "a length": lambda v: list(range(int(v))),
    "absolute": lambda v: (abs(v), max(v, 1), divmod(v, 2)),
    "a time": lambda v: str(datetime.timedelta(seconds=v)),
    "a mean": lambda v: statistics.mean([v, 1.0]),
    "the best": lambda v, best=[math.inf]: best.append(min(best[-1], v)) or best[-1],  # noqa: B006
}


@pytest.mark.parametrize("what", OUT_OF_TENSORS)
@pytest.mark.every(2)
def test_what_raises_for_some_values_of_a_tensor(what):
    """If Python raises, all effects before have happened once, and none after."""

    def run(compiled: bool):
        counter, seen, found = [0], [], []
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(x):
            counter[0] += 1
            loss = (weight * x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(OUT_OF_TENSORS[what](loss.item()))
            return loss.detach()

        call = sidefx_train.compile(step, backend="eager") if compiled else step
        for x in ((1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (math.nan, 1.0), (2.0, 3.0)):
            try:
                found.append(str(call(torch.tensor(x))))
            except (ArithmeticError, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
            found.append(str((weight.tolist(), counter, seen)))
        return found

    default = OUT_OF_TENSORS[what].__defaults__ if what == "the best" else None
    expected = run(False)
    if default:
        del default[0][1:]
    assert run(True) == expected


CHANGING = {
    "divided with floor": lambda v: (v // 0.1, 1.0 // v),
    "a remainder": lambda v: (v % 0.1, v % -3, divmod(v, 0.1)),
    "integers": lambda v: (int(v) % 3 + int(v) // 2, int(v * 1e18) * 10, math.floor(v), math.ceil(v), math.trunc(v)),
    "rounded": lambda v: (round(v), round(v, 1), round(v, -1)),
    "powers": lambda v: (v**2, 2**v, abs(v) ** 0.5, (-2.0) ** int(v)),
    "kinds": lambda v: (math.isnan(v), math.isinf(v), v == math.inf, bool(v), not v, v or 5, v and 5),
    "arithmetic": lambda v: (v + 1, v * 0.5, -v, abs(v), max(v, 1), min(v, 1)),
    "comparisons": lambda v: (v < 1, v <= 1, v == 1, 1 < v < 3, v in (1.0, 2.0)),
    "a mean": lambda v: (statistics.mean([v, 1.0]), statistics.median([v, 1.0, 0.0])),
}
VALUES = (1.0, 2.0, 3.0, -0.7, 0.3, math.inf, math.nan, -math.inf, 0.0, -0.0, 4.0)


@pytest.mark.parametrize("what", CHANGING)
def test_a_float_of_python_that_changes(what):
    given = [0.0]

    def step(x):
        return CHANGING[what](given[0]), x + 1

    compiled = sidefx_train.compile(step, backend="eager")
    for value in VALUES:
        if what == "a remainder" and str(value) == "-0.0":
            continue  # a condition sees 0.0
        given[0] = value
        try:
            expected = str(step(torch.ones(1)))
        except (ArithmeticError, ValueError) as error:
            with pytest.raises(type(error)) as raised:
                compiled(torch.ones(1))
            assert str(raised.value) == str(error)
        else:
            assert str(compiled(torch.ones(1))) == expected
    inside = [record for record in compiled.report().fallbacks if record.code == "SFX201"]
    assert not inside, "what is captured can be compiled"


def test_a_step_is_not_run_twice_when_a_late_number_fails(monkeypatch):
    """If a number of the graph's results raises after the graph, that is an error, not another run of the step."""
    monkeypatch.setattr(
        "sidefx_train.compile.capture.world.symbolic_numbers.number_calls.no_integer", lambda world, value: False
    )
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x):
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return int(loss.item())

    compiled = sidefx_train.compile(step, backend="aot_eager")
    assert compiled(torch.ones(2)) == 2
    before = weight.detach().clone()
    with pytest.raises(UnfinishedError, match="SFX207.*cannot convert float NaN"):
        compiled(torch.tensor([math.nan, 1.0]))
    assert weight[1] == before[1] - 0.1


@pytest.mark.parametrize(
    "compare",
    [lambda v: v == math.inf, lambda v: v != math.inf, lambda v: v < math.inf, lambda v: v >= -math.inf],
    ids=["equal", "unequal", "less", "not less"],
)
@pytest.mark.parametrize("of_tensor", [False, True])
def test_comparing_with_infinity_captures_finite_numbers_once(compare, of_tensor):
    """Regression: each finite number was a capture (observers of fake quantization ask whether they are new)."""
    state = {"v": math.inf}
    held = torch.tensor(math.inf)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if compare(held if of_tensor else state["v"]) else x * 3

    compiled = sidefx_train.compile(step, backend="eager")
    x = torch.ones(2)
    for value in (math.inf, 3.0, 2.5, 1.25, 7.5, -2.0):
        state["v"] = value
        held.fill_(value)
        assert torch.equal(compiled(x), step(x)), value
    assert len(compiled.report().captures) <= 3 and not compiled.report().fallbacks
    for value in (math.nan, -math.inf, math.inf, 4.0, 1e309):
        state["v"] = value
        held.fill_(value)
        assert torch.equal(compiled(x), step(x)), value


@pytest.mark.parametrize("asks", [np.isnan, np.isinf, lambda v: not np.isfinite(v)], ids=["nan", "inf", "finite"])
def test_numpy_asks_whether_a_loss_is_finite(asks):
    """Regression: that was a graph break, unlike ``math.isnan``."""

    def run(compiled: bool):
        weight = torch.nn.Parameter(torch.ones(2))

        def step(x):
            loss = (weight * x).sum()
            if asks(loss.item()):
                return "left out", type(asks(loss.item()))
            loss.backward()
            return loss.detach(), type(asks(loss.item()))

        call = sidefx_train.compile(step, backend="eager", keep_slower=True) if compiled else step
        found = [call(torch.tensor([value, 1.0])) for value in (1.0, 2.0, -3.0, math.nan, 4.0, math.inf, 5.0)]
        return str(found), str(weight.grad), call

    *expected, _ = run(False)
    *got, step = run(True)
    assert got == expected
    report = step.report()
    assert not report.breaks and len(report.captures) <= 2, report


def test_a_best_value_that_begins_at_infinity():
    """Regression: the first step was captured five times, and ran eagerly with an internal error."""
    state = {"best": math.inf}

    def step(x: torch.Tensor, value: float) -> torch.Tensor:
        state["best"] = min(state["best"], value)
        return x * state["best"]

    compiled = sidefx_train.compile(step, backend="eager")
    x = torch.ones(2)
    best = math.inf
    for value in (3.0, 4.0, 2.5, 2.75, 1.0):
        best = min(best, value)
        assert torch.equal(compiled(x, value), x * best)
        assert state["best"] == best
    assert not compiled.report().fallbacks


def test_a_known_nan_is_compared_without_a_message(monkeypatch):
    """Torch logs a comparison with NaN as one that failed."""
    nan = math.nan
    factor, best, shown = [0.5], [nan], []
    monkeypatch.setattr("torch.fx.experimental.sym_node.log.warning", lambda *given: shown.append(given))

    def step(x):
        value, other = x.sum().item(), factor[0]
        compared = value < nan, value >= nan, nan > value, value == nan, value != nan, nan == other, other != nan
        best[0] = min(best[0], value)
        return x * 2 if nan <= other else x, compared, max(other, nan)

    compiled = sidefx_train.compile(step, backend="eager")
    for n, value in enumerate((1.0, 2.0, nan, 3.0, math.inf)):
        factor[0], best[0] = 0.5 + n, nan
        wanted = str((step(torch.full((2,), value)), best))
        best[0] = nan
        assert str((compiled(torch.full((2,), value)), best)) == wanted
    report = compiled.report()
    assert not shown and report.replays == 5 and len(report.captures) == 2 and not report.breaks
