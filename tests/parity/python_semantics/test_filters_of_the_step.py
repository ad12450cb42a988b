"""Filters of warnings that the step sets itself apply to what it does inside: to its own warnings and to NumPy's."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning

ZEROS = np.zeros(3)


def afterwards(log):
    warnings.warn("w", RuntimeWarning, stacklevel=1)
    warnings.simplefilter("ignore")


def afterwards_of_numpy(log):
    np.log(ZEROS)
    warnings.simplefilter("ignore")


def before(log):
    warnings.simplefilter("ignore")
    np.log(ZEROS)


def between(log):
    warnings.simplefilter("ignore")
    np.log(ZEROS)
    warnings.simplefilter("always")
    np.sqrt(ZEROS - 1)


def ignored(log):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.log(ZEROS)


def shown(log):
    with warnings.catch_warnings():
        np.log(ZEROS)
        warnings.warn("w", RuntimeWarning, stacklevel=1)


def recorded(log):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        np.log(ZEROS)
    log.append([str(each.message) for each in found])


def caught(log):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            np.log(ZEROS)
            log.append("went on")
        except RuntimeWarning:
            log.append("caught")


def over_a_break(log):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        io.StringIO().write("x")
        print(end="", flush=True)
        warnings.warn("w", RuntimeWarning, stacklevel=1)
        np.log(ZEROS)
        log.append(len(warnings.filters))


def recorded_over_a_break(log):
    with warnings.catch_warnings(record=True) as found:
        open("/dev/null").close()
        warnings.simplefilter("always")
        np.log(ZEROS)
        warnings.warn("w", stacklevel=1)
    log.append([str(each.message) for each in found])


def of_code_of_numpy(log):
    log.append(bool(np.isnan(ZEROS[:0].mean())))


STEPS = [afterwards, afterwards_of_numpy, before, between, ignored, shown, recorded, caught, over_a_break]
STEPS += [recorded_over_a_break, of_code_of_numpy]


@pytest.mark.parametrize("program", STEPS, ids=lambda program: program.__name__)
def test_each_call_shows_what_eager_shows(program):
    def step(x, log):
        program(log)
        return x + 1

    def run(fn):
        log = []
        with warnings.catch_warnings(record=True) as issued:
            for _ in range(4):
                warnings.resetwarnings()
                warnings.simplefilter("always")
                fn(torch.ones(2), log)
        return log, [str(each.message) for each in issued if not issubclass(each.category, SideFXWarning)]

    assert run(sidefx_train.compile(step, backend="eager", warmup="now")) == run(step)
