"""Slices as values: their bounds are any objects, and each slice that a step creates is a new one."""

from __future__ import annotations

import pytest
import torch

import sidefx_train
from tests.support.symbolic_numbers import Space, graphs_for


def make():
    return Space(data=torch.arange(20.0), cut=slice(1, torch.tensor(4)), kept=None)


def kept_tensors(space, k):
    start = space.data[0] * k
    space.kept = slice(start, start + 1)
    return space.kept.start


def kept_containers(space, k):
    bounds = [k]
    space.kept = slice(bounds, None, {"a": space.data[:2] * 2})
    bounds.append(3)
    return space.kept


def outside_with_a_tensor(space, k):
    return space.data[space.cut].sum(), space.cut.stop + k


def sliding(space, k):
    space.kept = slice(k, k + 3)
    return space.data[space.kept].sum()


def sliding_from_before(space, k):
    found = space.data[space.kept].sum() if space.kept else 0
    space.kept = slice(k, k + 3)
    return found


def compared(space, k):
    return slice(1, 2) == slice(1, 2), slice(1, k % 2) == slice(1, 1), slice(1, 9, 3).indices(10)


@pytest.mark.parametrize(
    "step",
    [kept_tensors, kept_containers, outside_with_a_tensor, sliding, sliding_from_before],
    ids=lambda step: step.__name__,
)
def test_a_slice_has_the_bounds_that_eager_python_gives_it(step):
    assert 1 <= graphs_for(step, make) <= 3


def test_slices_are_compared_by_their_bounds():
    assert graphs_for(compared, make) >= 1


def test_windows_at_tensors_are_captured_behind_the_break():
    """The same as nanoGPT's ``get_batch``."""

    def windows(space, k):
        places = torch.randint(12, (3,))
        return torch.stack([space.data[place : place + 8] for place in places]) * k

    assert graphs_for(windows, make) >= 1


def test_an_outside_slice_leaves_as_itself_and_one_made_is_new():
    cut = slice(1, 2)

    def step(x, given):
        return x + 1, given, slice(1, 2)

    compiled = sidefx_train.compile(step, backend="aot_eager")
    made = []
    for _ in range(3):
        _, same, new = compiled(torch.ones(2), cut)
        assert same is cut
        assert new == cut
        made.append(new)
    assert len({id(new) for new in made}) == 3
    other = slice(1, 2)
    assert compiled(torch.ones(2), other)[1] is other


def test_a_printed_slice_shows_its_tensors(capsys):
    def step(x):
        print(slice(0, x.sum()))

    compiled = sidefx_train.compile(step, backend="aot_eager")
    compiled(torch.ones(2))
    compiled(torch.ones(3))
    assert capsys.readouterr().out == "slice(0, tensor(2.), None)\nslice(0, tensor(3.), None)\n"
