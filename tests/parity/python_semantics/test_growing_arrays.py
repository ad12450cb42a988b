"""NumPy arrays that become longer at every call: histories of losses, windows of them, and batches of other lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.parity import Program, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


class History:
    """Losses, like the buffers of training libraries."""

    def __init__(self):
        self.values = np.array([], dtype=np.float64)

    def update(self, value):
        self.values = np.append(self.values, value)

    def mean(self, window):
        return self.values[-window:].mean()


def appended(history, x):
    history.update(x.sum().item())


def of_a_window(history, x):
    history.update(x.sum().item())
    return history.mean(3)


def concatenated(history, x):
    history.values = np.concatenate([history.values, [1.0, 2.0]])
    return history.values.shape, history.values.max()


def counted(history, x):
    history.values = np.hstack((history.values, 1.0))
    return len(history.values), history.values.size


def as_a_tensor(history, x):
    history.values = np.append(history.values, 1.0)
    return torch.from_numpy(history.values).sum()


@pytest.mark.parametrize(
    "use", [appended, of_a_window, concatenated, counted, as_a_tensor], ids=lambda use: use.__name__
)
def test_a_history_that_grows(use):
    def make() -> Program:
        history = History()

        def step(x):
            found = use(history, x)
            return x * 2, found

        return Program(step, lambda index: (torch.full((2,), float(index)),), (history,))

    report = parity(make, steps=20, captures=None, whole=False)
    assert report.fallback_count <= 3, str(report)
    assert len(report.captures) <= 8, [recapture.source for recapture in report.recaptures]
    assert all(len(part.captures) <= 6 for part in report.parts), str(report)


def test_batches_of_other_lengths():
    def make() -> Program:
        def step(batch):
            return torch.from_numpy(batch).float() * 2

        return Program(step, lambda index: (np.arange(3 + index % 5, dtype=np.float64),))

    report = parity(make, steps=12, captures=None)
    assert not report.fallbacks, str(report)
