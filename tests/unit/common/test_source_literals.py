"""Values spelled out in generated source evaluate to themselves."""

from __future__ import annotations

import enum
import math

import pytest
import torch

import sidefx_train
from sidefx_train.compile.capture.guards.guard import same_value
from sidefx_train.compile.capture.guards.symbol_guards import number_conditions
from sidefx_train.compile.common.source_literals import is_name, literal


class Level(enum.IntEnum):
    LOW = 1


class Shown(str):
    def __repr__(self):
        return "shown"


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 10**5000, -(10**5000), 0.0, -0.0, 1.5, -1e-300, math.inf, -math.inf, math.nan, 1j,
        complex(-0.0, -0.0), complex(math.nan, math.inf), "a'\"\n\ud800", b"\x00'", (), (1,), (1, (math.inf, "a")),
    ],
    ids=lambda value: str(type(value).__name__),
)  # fmt: skip
def test_evaluates_to_the_value(value):
    text = literal(value)
    assert text is not None
    found = eval(f"[{text}]", {})[0]
    assert type(found) is type(value)
    assert same_value(found, value)


@pytest.mark.parametrize("value", [Level.LOW, Shown("a"), (1, Shown("a")), [1], torch.float32, object], ids=repr)
def test_what_has_no_literal_is_named(value):
    assert literal(value) is None


def test_names():
    assert [is_name(text) for text in ("a", "class", "a-b", "", "1a", Shown("a"), "é")] == [True] + 6 * [False]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.0, 2.5])
def test_a_condition_on_an_exact_number(value):
    sympy = pytest.importorskip("sympy")
    symbol = sympy.Symbol("s")
    # A condition that is false as written makes the number exact.
    conditions, _ = number_conditions([sympy.Gt(symbol, sympy.oo, evaluate=False)], {"s": None}, {"s": value})
    (condition,) = conditions
    for other in (math.nan, math.inf, -math.inf, 0.0, -0.0, 2.5, 3.0):
        assert eval(condition.code, {"math": math, "s": other}) == same_value(value, other)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_numbers_that_are_not_finite_in_guards(backend):
    """The bounds of an observer start at infinity; a break passes them to the next part as numbers."""

    def run(wrap):
        torch.manual_seed(0)
        low, high = torch.tensor(math.inf), torch.tensor(-math.inf)
        seen = []

        def step(x):
            y = x.sin()
            if y.sum() > 1e9:  # a condition on a value divides the step
                return y
            if low.item() != low.item() or low > high:
                seen.append((low.item(), high.item()))
            low.copy_(torch.minimum(low, y.min()))
            high.copy_(torch.maximum(high, y.max()))
            return y

        step = wrap(step)
        results = []
        for i in range(5):
            if i == 3:
                low.fill_(math.nan)
            results.append(step(torch.randn(4)).tolist())
        return results, str(seen), low.item(), high.item()

    eager = run(lambda step: step)
    captured = run(lambda step: sidefx_train.compile(step, backend=backend))
    assert str(eager) == str(captured)


def test_fake_quantization_trains_as_in_eager():
    quantization = pytest.importorskip("torch.ao.quantization")

    def run(wrap):
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 3)
        fake = quantization.FakeQuantize(observer=quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x):
            loss = fake(layer(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        return [step(torch.randn(4, 3)).item() for _ in range(4)], layer.weight.tolist(), fake.scale.tolist()

    assert run(lambda step: step) == run(lambda step: sidefx_train.compile(step, backend="eager"))
