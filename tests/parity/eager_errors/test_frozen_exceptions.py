"""Exceptions of frozen dataclasses: nothing can be assigned to them, and they are raised all the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import sidefx_train


@dataclasses.dataclass(frozen=True)
class Diverged(Exception):
    step: int


KEPT: list[Diverged] = []


def escapes(x):
    if x.shape[0]:
        raise Diverged(3)


def handled(x):
    try:
        escapes(x)
    except Diverged as error:
        return x * error.step


def kept_with_cause(x):
    try:
        raise Diverged(1) from ValueError("cause")
    except Diverged as error:
        KEPT.append(error)
    return x + 1


@pytest.mark.parametrize("program", [escapes, handled, kept_with_cause])
def test_they_are_raised(program):
    def outcome(step):
        KEPT.clear()
        results = []
        for _ in range(3):
            try:
                results.append(step(torch.ones(2)).tolist())
            except Diverged as error:
                results.append((error.step, error.__traceback__ is not None, repr(error.__context__)))
        return results, [(error.step, repr(error.__cause__), error.__suppress_context__) for error in KEPT]

    step = sidefx_train.compile(program, backend="eager")
    assert outcome(step) == outcome(program)
    assert program is escapes or step.report().replays == 3
