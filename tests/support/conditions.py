"""Conditions on a loss; kept out of test modules because pytest rewrites the asserts there."""

from __future__ import annotations

import math

import torch


def skipping(loss):
    return not torch.isfinite(loss)


def raising(loss):
    if torch.isnan(loss):
        raise FloatingPointError(f"loss {loss.item()}")
    return False


def raising_in_parts(loss):
    if loss > 1e6 or torch.isnan(loss).any():
        what = "large" if loss > 1e6 else "no number"
        raise FloatingPointError(what)
    return False


def asserting(loss):
    assert (loss < 1e6).all(), f"loss is {loss.item()}"
    return False


def asserting_a_number(loss):
    assert -1 < loss.item() + 1 <= 1e6, "out of range"
    return False


def raising_twice(loss):
    value = loss.item()
    if not math.isfinite(value):
        raise FloatingPointError(value)
    if value < 0:
        raise ValueError(value)
    return False


def by_math(loss):
    return math.isnan(float(loss)) or math.isinf(loss.item())


def unequal_to_itself(loss):
    value = loss.item()
    return value != value


def not_at_most_itself(loss):
    value = loss.item()
    return not value <= value


def difference_with_itself(loss):
    value = loss.item()
    return not value - value == 0


def times_zero(loss):
    value = float(loss)
    return value * 0 != 0


def item_of_a_flag(loss):
    return torch.isnan(loss).item()


def counted(loss):
    return (torch.isnan(loss) | torch.isinf(loss)).sum() > 0


def negated(loss):
    return not (~torch.isnan(loss)).all()


FORMS = [
    skipping, raising, raising_in_parts, asserting, asserting_a_number, raising_twice, by_math, unequal_to_itself,
    not_at_most_itself, difference_with_itself, times_zero, item_of_a_flag, counted, negated,
]  # fmt: skip
