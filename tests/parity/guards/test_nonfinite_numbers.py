"""Numbers in outside tensors that are, become or stop being infinite or NaN: comparisons follow arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

import sidefx_train

CONDITIONS = {
    "equals infinity": lambda t: t == math.inf,
    "below infinity": lambda t: t < math.inf,
    "not itself": lambda t: t != t,
    "either": lambda t: (t == math.inf) | (t != t),
    "number equals infinity": lambda t: t.item() == math.inf,
    "number not itself": lambda t: t.item() != t.item(),
    "difference with itself": lambda t: (t.item() - t.item()) == 0,
    "negated": lambda t: not (t >= t),
    "minus infinity": lambda t: t == -math.inf,
}


@pytest.mark.parametrize(
    "values", [(1.0, math.inf, math.nan, 2.0, -math.inf), (math.inf, 1.0), (math.nan, 1.0, math.inf)]
)
@pytest.mark.parametrize("name", CONDITIONS)
def test_decides_as_arithmetic_does(name, values):
    held = torch.tensor(0.0)

    def step(x):
        return x + 1 if CONDITIONS[name](held) else x - 1

    captured = sidefx_train.compile(step, backend="eager")
    for value in (*values, *values):
        held.fill_(value)
        assert captured(torch.zeros(1)).item() == step(torch.zeros(1)).item(), value
    assert captured.report().replays == 2 * len(values)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_running_minimum_that_begins_at_infinity(backend):
    def run(wrap):
        torch.manual_seed(0)
        low = torch.tensor(math.inf)

        def step(x):
            now = x.min()
            low.copy_(now if low == math.inf else low + 0.1 * (now - low))
            return x * low

        step = wrap(step)
        return [step(torch.randn(4)) for _ in range(4)], low

    torch.testing.assert_close(run(lambda step: step), run(lambda step: sidefx_train.compile(step, backend=backend)))
