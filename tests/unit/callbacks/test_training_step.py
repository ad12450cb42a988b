"""Parts of the Lightning callback that can be tested alone."""

from __future__ import annotations

import functools

import pytest

from sidefx_train.callbacks.training_step import Lightning, ignores_argument


def unused(self, batch, batch_idx):
    return batch + 1


def used(self, batch, batch_idx):
    return batch + batch_idx


def used_in_a_closure(self, batch, batch_idx):
    return lambda: batch_idx


def used_in_a_comprehension(self, batch, batch_idx):
    return [batch_idx for _ in range(2)]


def overwritten(self, batch, batch_idx):
    batch_idx = 3
    return batch_idx


def looked_up(self, batch, batch_idx):
    return locals()["batch_idx"]


def passed_on(self, batch, batch_idx):
    return used(self, batch, batch_idx=batch_idx)


@functools.wraps(unused)
def wrapper(*args):
    return args


@pytest.mark.parametrize(
    ("function", "ignores"),
    [
        (unused, True),
        (used, False),
        (used_in_a_closure, False),
        (used_in_a_comprehension, False),
        (overwritten, False),
        (looked_up, False),
        (passed_on, False),
        (wrapper, False),
        (functools.partial(unused, 1), False),
        (lambda self, batch: batch, False),
    ],
)
def test_ignores_argument(function, ignores):
    assert ignores_argument(function, 2) is ignores, "whether batch_idx is looked at"


def test_a_trainer_of_no_lightning_is_refused():
    with pytest.raises(TypeError, match="Lightning Trainer"):
        Lightning(object())
