"""``one_hot`` with classes out of range: eager's error, before anything has changed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import sidefx_train

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")


def outcome(run, classes):
    total, log = torch.zeros(2, 4, dtype=torch.int64), []
    try:
        result = run(classes, total, log).tolist()
    except RuntimeError as error:
        result = str(error)
    return result, total.tolist(), log


def counted(classes, total, log):
    """Regression: a class out of range gave a row of zeros."""
    total.add_(1)
    return total.add_(F.one_hot(classes, 4))


def handled(classes, total, log):
    try:
        total.add_(F.one_hot(classes % 7, num_classes=4))
    except RuntimeError as error:
        log.append(str(error))
    return total * 2


@pytest.mark.parametrize("step", [counted, handled])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_classes_out_of_range(step, backend):
    compiled = sidefx_train.compile(step, backend=backend)
    for classes in ([0, 3], [1, 4], [2, 2], [-1, 0], [3, 6], [3, 1]):
        classes = torch.tensor(classes)
        assert outcome(compiled, classes) == outcome(step, classes)
    assert compiled.report().replays
