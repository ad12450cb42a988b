"""Numbers that change from call to call stay inputs of one graph, however a configuration object stores them."""

from __future__ import annotations

import pytest
import torch

import sidefx_train


class Both(dict):
    """Stores each entry as an item and as an attribute."""

    def __setattr__(self, name, value):
        if isinstance(value, (list, dict)) or hasattr(value, "items") or getattr(value, "shape", None):
            raise TypeError(name)
        super().__setattr__(name, value)
        super().__setitem__(name, value)


def as_both(both, x):
    both.step = both.step + 1
    return x * both.step, both["step"]


def by_setdefault(both, x):
    both.step = both.step + 1
    once = {}
    once.setdefault("a", both.step)
    return x * once.pop("b", both.step) + once.get("c", both.step) + once["a"]


def what_all_numbers_have(both, x):
    both.step = both.step + 1
    step = both.step
    try:
        step.missing  # noqa: B018
    except AttributeError as error:
        return x * step, str(error), step.__class__, step.imag, step.denominator, hasattr(step, "real")


@pytest.mark.parametrize("step", [as_both, by_setdefault, what_all_numbers_have], ids=lambda step: step.__name__)
def test_a_counter_is_no_reason_for_another_capture(step):
    def history(run):
        both = Both()
        both.step = 0
        return [(repr(run(both, torch.ones(1))), dict(both), vars(both)["step"]) for _ in range(6)]

    compiled = sidefx_train.compile(step, backend="eager")
    assert history(compiled) == history(step)
    assert compiled.report().graph_count <= 2, str(compiled.report())


@pytest.mark.parametrize(
    "truth",
    [
        lambda v: 1 if v else 2,
        lambda v: 2 if not v else 1,
        lambda v: 1 if v and v < 2 else 3,
        lambda v: v or 5.0,
        lambda v: 1 + bool(v),
    ],
    ids=["if", "not", "and", "or", "bool"],
)
def test_a_float_is_true_whatever_it_is(truth):
    values = (0.0, 1.5, 2.5, -0.0, 0.25, -3.0, 4.5, 0.0)
    step = sidefx_train.compile(lambda v, x: x * truth(v), backend="eager")
    for value in values:
        assert torch.equal(step(value, torch.ones(2)), torch.ones(2) * truth(value))
    assert step.report().graph_count <= 4, str(step.report())
