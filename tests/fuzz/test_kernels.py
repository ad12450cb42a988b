"""Random functions of tensors through Inductor, against eager: a fixed few, and many under ``make fuzz``."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import sidefx_train
from sidefx_train.compile.gpu.simulation import SimulatedStep
from sidefx_train.config import CompileConfig
from tests.fuzz.compare import Differs
from tests.fuzz.kernels import check, generate
from tests.fuzz.shrink import shrink
from tests.support.disk_cache import new_cache

FIXED = (pytest.param(1010, marks=pytest.mark.slow), 3009)
"""Index-add to a tensor that is also read; a tensor saved for the backward in another layout than it expects."""

MANY = int(os.environ.get("FUZZ_N", "5000")) // 50
SEED = int(os.environ.get("FUZZ_SEED", "0"))
_PART = 10


def run(number: int, compiled: Callable[..., Any] = sidefx_train.compile) -> None:
    """Checks one program; fails with a shorter one that differs."""
    source = generate(number)
    try:
        check(source, compiled)
    except Differs as error:
        shorter = shrink(source, partial(_differs, compiled=compiled), 60)
        pytest.fail(f"program {number}: {error}\n{shorter}", pytrace=False)


def _differs(source: str, compiled: Callable[..., Any]) -> bool:
    try:
        check(source, compiled)
    except Differs:
        return True
    except Exception:  # the shorter program is invalid: no counterexample
        return False
    return False


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    new_cache(tmp_path, monkeypatch)


@pytest.mark.parametrize("number", FIXED)
def test_fixed_kernels(number):
    run(number)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(max(1, MANY // _PART)))
def test_many_kernels(part):
    for number in range(_PART):
        run(SEED * 1_000_000 + part * _PART + number)


def simulated(function: Callable[..., Any], **options: Any) -> SimulatedStep:
    return SimulatedStep(function, CompileConfig(verify=0, **options))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(max(1, MANY // _PART // 2)))
def test_many_kernels_of_a_gpu(part):
    pytest.importorskip("triton")
    for number in range(_PART):
        seed = SEED * 1_000_000 + part * _PART + number
        if "dropout" not in generate(seed):  # a mask is drawn in the order of memory, which differs between devices
            run(seed, simulated)
