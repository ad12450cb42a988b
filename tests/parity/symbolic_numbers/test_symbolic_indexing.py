"""Tensors indexed by an integer that changes with every call: one graph, as for any other changing number."""

from __future__ import annotations

import pytest
import torch

from tests.support.symbolic_numbers import Space, graphs_for


def make():
    return Space(data=torch.arange(30.0), rows=torch.arange(40.0).reshape(4, 10).t().contiguous())


def an_item(space, k):
    return space.data[k] + space.data[k + 1], space.rows[k].sum()


def a_column(space, k):
    return space.rows[:, k % 4].sum(), space.rows[..., k % 4] * 2, space.rows[2:5, k % 4].sum()


def with_new_dimensions(space, k):
    return space.rows[None, k % 4, None].shape, space.rows[k % 4, 1:3, None] * 2


def from_the_end(space, k):
    return space.rows[-1 - k % 3].sum()


def stored(space, k):
    space.rows[k % 4] = 0.5
    space.rows[:, k % 3] = space.data[:10]
    space.rows[k % 2, k % 3] = space.data[k]
    return space.rows.clone()


def changed_in_place(space, k):
    space.rows[k % 4][1:] = 3.0
    space.rows[k % 3].add_(1)
    space.rows[k % 3] += 1
    return space.rows.clone(), space.rows._version


def views_that_leave(space, k):
    return space.rows[k % 3], space.rows[1:, k % 2], space.data[: k % 3 + 2]


def with_a_history(space, k):
    leaf = (space.rows * 1).requires_grad_()
    (leaf[k % 3, 1:] ** 2).sum().backward()
    return leaf.grad, leaf[k % 3].grad_fn.name(), leaf[1:3, k % 2]


@pytest.mark.parametrize(
    "step",
    [
        an_item,
        a_column,
        with_new_dimensions,
        from_the_end,
        stored,
        changed_in_place,
        views_that_leave,
        with_a_history,
    ],
    ids=lambda step: step.__name__,
)
def test_a_changing_index_takes_no_further_capture(step):
    assert graphs_for(step, make) == 2


def passes_zero(space, k):
    return space.rows[k - 3].sum()


def with_tensors(space, k):
    return space.rows[k % 3, torch.tensor([0, 1])], space.rows[[k % 3, 1]], space.rows[k % 3][space.rows[0] > 3]


def past_the_end(space, k):
    return space.data[26 + k]


def past_the_end_and_caught(space, k):
    try:
        return space.data[26 + k].sum()
    except IndexError as error:
        return str(error)


@pytest.mark.parametrize(
    "step", [passes_zero, with_tensors, past_the_end, past_the_end_and_caught], ids=lambda step: step.__name__
)
def test_other_indices_give_what_eager_gives(step):
    graphs_for(step, make)


def reads_versions(space, k):
    before = space.rows._version
    space.rows.add_(1)
    detached, data, made = space.rows.detach(), space.rows.data, torch.zeros(2)
    detached.mul_(2)
    data.add_(1)
    made.add_(1)
    tensors = (space.rows, detached, data, made, space.rows.view(-1), space.rows[k % 3])
    return before, [tensor._version for tensor in tensors]


def decides_on_a_version(space, k):
    if space.rows._version == 3:
        space.data.add_(1)
    space.rows.add_(1)
    return space.data.sum()


def test_version_counters_go_on_from_call_to_call():
    assert graphs_for(reads_versions, make) == 2
    graphs_for(decides_on_a_version, make)
