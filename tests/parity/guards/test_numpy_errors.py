"""How NumPy reports floating-point errors: set in the step, around it, or told to a function."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning


def logarithm(x, log):
    return x + float(np.exp(np.log(np.float64(0.0))))


def raising(x, log):
    try:
        with np.errstate(divide="raise"):
            return logarithm(x, log)
    except FloatingPointError as error:
        log.append(str(error))
        return x * 3


def ignoring(x, log):
    with np.errstate(divide="ignore"), np.errstate(over="raise"):
        log.append(dict(np.geterr()))
        return logarithm(x, log)


def setting(x, log):
    old = np.seterr(divide="ignore")
    try:
        return logarithm(x, log)
    finally:
        np.seterr(**old)
        log.append(np.geterr()["divide"])


def telling(x, log):
    with np.errstate(divide="call", call=lambda kind, flag: log.append(kind)):
        return logarithm(x, log)


def printing(x, log):
    with np.errstate(divide="print"):
        return logarithm(x, log)


@np.errstate(divide="ignore")
def decorated(x, log):
    return logarithm(x, log) + len(np.geterr()["divide"])


STEPS = [logarithm, raising, ignoring, setting, telling, printing, decorated]


@pytest.mark.parametrize("program", STEPS, ids=lambda program: program.__name__)
def test_each_call_reports_as_eager(program, capfd):
    def run(fn: Any) -> Any:
        log: list[Any] = []
        results = []
        for state in ({}, {}, {"divide": "raise"}, {"divide": "ignore"}, {"divide": "ignore"}, {}):
            with warnings.catch_warnings(record=True) as shown, np.errstate(**state):
                warnings.simplefilter("always")
                warnings.simplefilter("ignore", SideFXWarning)
                try:
                    results.append(fn(torch.ones(2), log).tolist())
                except FloatingPointError as error:
                    results.append(str(error))
                results.append([str(each.message) for each in shown])
                results.append(dict(np.geterr()))
        return results, log, capfd.readouterr().out

    assert run(sidefx_train.compile(program, backend="eager")) == run(program)


def test_a_capture_that_stops_inside_leaves_numpys_setting():
    before = np.geterr()

    def step(x):
        with np.errstate(divide="raise"):
            sidefx_train_unknown()  # noqa: F821
        return x

    compiled = sidefx_train.compile(step, backend="eager")
    for _ in range(2):
        with pytest.raises(NameError):
            compiled(torch.ones(2))
        assert np.geterr() == before


@pytest.mark.parametrize("program", [raising, ignoring, decorated], ids=lambda program: program.__name__)
def test_a_setting_inside_the_step_is_captured(program):
    compiled = sidefx_train.compile(program, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2), [])
    assert compiled.report().replays == 3, str(compiled.report())
