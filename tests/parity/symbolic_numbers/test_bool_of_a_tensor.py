"""``bool(x)`` of a tensor whose value exists only when the graph runs."""

from __future__ import annotations

import warnings

import pytest
import torch

import sidefx_train

LOG: list[bool] = []


def truth(value):
    return bool(value)


WHOLE = {
    "returned": lambda t: bool(t),
    "in a list": lambda t: [bool(t)],
    "in a dict": lambda t: {"a": bool(t)},
    "as text": lambda t: f"{bool(t)} {bool(t)!r}",
    "logged": lambda t: LOG.append(bool(t)),
    "as a float": lambda t: float(bool(t)),
    "times a tensor": lambda t: torch.ones(2) * bool(t),
    "combined": lambda t: bool(t) & bool(~t),
    "its type": lambda t: (isinstance(bool(t), bool), type(bool(t)).__name__),
    "of a float": lambda t: bool(t * 2.0 - 1),
    "of one element": lambda t: bool(t.view(1, 1)),
}
IN_PARTS = {
    "identity": lambda t: 1 if bool(t) is True else 2,
    "equality": lambda t: 1 if bool(t) == True else 2,  # noqa: E712
    "as a key": lambda t: {True: 5, False: 6}[bool(t)],
    "as an index": lambda t: [7, 8][bool(t)],
    "in a set": lambda t: {bool(t)},
    "a sum": lambda t: bool(t) + 1,
    "a choice": lambda t: 5 if bool(t) else 6,
    "a maximum": lambda t: max(bool(t), False),
    "a maximum of items": lambda t: max(t.item(), False),
    "a function's result": lambda t: 1 if truth(t) else -1,
}


def _same(want, have):
    if isinstance(want, torch.Tensor):
        return torch.equal(want, have)
    return type(want) is type(have) and repr(want) == repr(have)


@pytest.mark.parametrize("name", [*WHOLE, *IN_PARTS])
def test_equal(name):
    use = WHOLE.get(name) or IN_PARTS[name]

    def step(x):
        return use(x.sum() > 0), x * 2

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=name in WHOLE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        for value in (1.0, 1.0, -1.0, 1.0, -1.0):
            x = torch.full((2,), value)
            LOG.clear()
            want, log = step(x), list(LOG)
            LOG.clear()
            have = compiled(x)
            assert _same(want[0], have[0]) and torch.equal(want[1], have[1])
            assert list(map(repr, log)) == list(map(repr, LOG))
    assert compiled.report().replays == 5


@pytest.mark.parametrize("test", [truth, bool, lambda t: bool(t.all()), lambda t: t.item()])
def test_a_branch_that_only_raises_is_assumed(test):
    def step(x):
        if not test((x.abs() < 10).all()):
            raise ValueError("too large")
        return x * 2

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(ValueError, match="too large"):
        compiled(torch.full((2,), 11.0))
    assert len(compiled.report().captures) == 1
