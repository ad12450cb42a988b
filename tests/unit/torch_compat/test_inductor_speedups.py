"""Faster code generation generates the same code, for random chains of layers; tests the switches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidefx_train.compile.backend import inductor, inductor_call
from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.pipeline import capture_step
from sidefx_train.config import CompileConfig
from sidefx_train.switches import CODEGEN, SWITCHES, enabled, switched_off, without
from tests.fuzz import layers


def _code(numbers: range, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the code generated for some chains, compiled as one step."""
    step, inputs = layers.training_step([layers.generate(number) for number in numbers])
    config = CompileConfig(autotune="off")
    captured = capture_step.capture(step, tuple(inputs), {}, "step", Specialization())
    code: list[str] = []

    def noted(build: Any, caller: str, kernels: str, *_: Any) -> Any:
        code.extend((caller, kernels))
        return lambda _: []

    monkeypatch.setattr(inductor_call.Build, "whole", noted)
    inductor._lower(captured.traced, config, inductor.Clock(), True)
    assert code, "nothing was generated"
    return code


@pytest.mark.parametrize("first", [2, *(pytest.param(first, marks=pytest.mark.slow) for first in range(8, 48, 8))])
def test_the_same_code_without_any_of_them(first, monkeypatch):
    numbers = range(first, first + 3 if first == 2 else first + 8)
    quick = _code(numbers, monkeypatch)
    with without(*CODEGEN):
        plain = _code(numbers, monkeypatch)
    if quick == plain:
        return
    for name in CODEGEN:  # find the switch that differs
        with without(name):
            assert _code(numbers, monkeypatch) == quick, f"{name} changes the generated code"
    raise AssertionError("the generated code is another where all are switched off")


def test_switches(monkeypatch):
    assert not switched_off() and all(enabled(name) for name in SWITCHES)
    with without("matmul", "lstm"):
        assert switched_off() == {"matmul", "lstm"} and not enabled("matmul")
    monkeypatch.setenv("SIDEFX_DISABLE", "attention, matmul")
    assert switched_off() == {"matmul", "attention"}
    monkeypatch.setenv("SIDEFX_DISABLE", "atention")
    with pytest.raises(ValueError, match="no switch is called atention; there are attention"):
        enabled("matmul")
    with pytest.raises(ValueError, match="no switch is called x"), without("x"):
        pass


def test_a_switch_makes_another_entry_in_the_cache():
    from sidefx_train.compile.backend.graph_cache import key_of

    captured = capture_step.capture(torch.tanh, (torch.ones(3),), {}, "step", Specialization())
    keys = {key_of(captured.traced, CompileConfig())}
    with without("rematerialize"):
        keys.add(key_of(captured.traced, CompileConfig()))
    assert len(keys) == 2 and None not in keys
