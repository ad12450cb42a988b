"""The report uses the names of values in the step's source, and shows where each was read."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train.errors import SideFXWarning


class Settings:
    def __init__(self) -> None:
        self.name = "a"


settings = Settings()


def _compiled(fn: Any, **options: Any) -> Any:
    return sidefx_train.compile(fn, backend="eager", **options)


def _conditions(step: Any) -> set[str]:
    return {guard.condition for guard in step.report().guards}


def test_parameters_have_their_names() -> None:
    def step(x, scale, *rest, shift, **more):
        return x * scale + rest[0] + shift + more["extra"]

    step = _compiled(step)
    step(torch.ones(2), 2, 3, 4, shift=5, extra=6)
    assert {
        "x is a Tensor float32[2] strides [1] on cpu",
        "scale == 2",
        "rest[0] == 3",
        "shift == 5",
        "extra == 6",
    } <= _conditions(step)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs):
        return self.layer(inputs)

    def training_step(self, batch):
        return self(batch).sum()

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


@pytest.mark.parametrize("what", ["module", "method"])
def test_self_is_no_parameter(what: str) -> None:
    model = Model()
    step = _compiled(model if what == "module" else model.training_step)
    step(torch.ones(1, 2))
    name = "inputs" if what == "module" else "batch"
    assert f"{name} is a Tensor float32[1, 2] strides [2, 1] on cpu" in _conditions(step)


def test_every_guard_has_a_line() -> None:
    model, opt_in = Model(), {"on": True}
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        if opt_in["on"] and settings.name:
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = _compiled(step)
    step(torch.ones(1, 2))
    guards = step.report().guards
    assert guards and not [guard for guard in guards if guard.location is None]
    (batch,) = {guard.location for guard in guards if guard.source == "x"}
    assert batch.line == step.__wrapped__.__code__.co_firstlineno
    assert f"{__name__}.settings.name == 'a'" in _conditions(step)


def test_variables_behind_a_break_have_their_names() -> None:
    def step(x, count):
        total = x * 2
        os.times()
        return total * count

    step = _compiled(step)
    with pytest.warns(SideFXWarning):
        step(torch.ones(2), 3)
    found = {guard.condition for part in step.report().parts for guard in part.guards}
    assert {"total is a Tensor float32[2] strides [1] on cpu", "count == 3"} <= found


def test_breaks_behind_a_break_are_among_the_breaks() -> None:
    def step(x):
        os.times()
        x = x + 1
        os.times()
        return x * 2

    step = _compiled(step)
    with pytest.warns(SideFXWarning):
        step(torch.ones(2))
    report = step.report()
    first = step.__wrapped__.__code__.co_firstlineno
    assert [found.location.line - first for found in report.breaks] == [1, 3]
    assert "2 graph breaks" in str(report)
    assert report.to_dict()["parts"][0]["breaks"], "a part says its own too"


def test_a_value_that_keeps_changing_is_one_row() -> None:
    def step(x):
        return x * len(settings.name)

    step = _compiled(step, recapture_limit=3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(8):
            settings.name = "ab"[i % 2] + str(i)
            step(torch.ones(2))
    settings.name = "a"
    (record,) = step.report().fallbacks
    assert (record.code, record.count) == ("SFX203", step.report().fallback_count)
    assert f"{__name__}.settings.name" in record.reason
    assert sum("SFX203" in str(warning.message) for warning in said) == 1


def test_a_condition_on_a_size_is_said_as_one() -> None:
    step = _compiled(lambda x: x * 2, dynamic=True)
    step(torch.ones(5, 2))
    step(torch.ones(1, 2))
    (record,) = step.report().recaptures
    assert record.source == "x.shape[0]"
    assert step.report().captures[1].trigger == "x.shape[0] > 1 no longer holds: now x.shape[0] = 1"


def test_parameters_named_like_what_python_or_torch_uses() -> None:
    def step(input, torch, id, inf, s0):
        return input * torch + id + inf * s0

    step = _compiled(step)
    for i in range(3):
        given = [torch.full((2,), float(i + k)) for k in range(4)]
        assert torch.equal(step(*given, i), step.__wrapped__(*given, i))
    assert {"input", "torch", "id", "inf", "s0"} <= {guard.source for guard in step.report().guards}
