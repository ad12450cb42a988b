"""Loops over ``range`` of integers that change: the number of items is guarded, not the bounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.parity import Program, parity

LENGTHS = (9, 14, 15, 10, 13, 12, 16, 11)


def chunks(x):
    return [x[i : i + 128].logsumexp(-1) for i in range(0, x.shape[0], 128)]


def chunks_in_a_loop(x):
    parts = []
    for i in range(0, len(x), 100):
        parts.append(x[i : i + 100].logsumexp(-1))
    return parts


def equal_parts(x):
    size = (len(x) + 3) // 4
    return [x[i : i + size].sum(-1) * i for i in range(0, len(x), size)]


def windows(x):
    return [x[i].sum()[None] * i for i in range(len(x) - 3, len(x))]


def backwards(x):
    return [x[max(i - 100, 0) : i].logsumexp(-1) for i in range(len(x), 0, -100)]


def numbered(x):
    return [x[i : i + 128].sum(-1) * k for k, i in enumerate(range(0, len(x), 128))]


def listed(x):
    starts = list(range(0, len(x), 128))
    return [x[i : i + 128].sum(-1) for i in starts] + [x.sum()[None] * len(starts)]


def reverse(x):
    return [x[i : i + 128].sum(-1) * (i + 1) for i in reversed(range(0, len(x), 128))]


def paired(x):
    return [x[i : i + 128].sum(-1) * k for i, k in zip(range(0, len(x), 128), (2.0, 3.0))]


def none_at_all(x):
    return [x.sum()[None]] + [x[i] for i in range(len(x), 0)]


def kept(x, seen):
    seen.append(range(0, len(x), 128))
    return [x.sum()[None] * len(seen[-1])]


ONE_COUNT = (chunks, chunks_in_a_loop, equal_parts, windows, backwards, numbered, listed, reverse, paired, none_at_all)


def program(parts, lengths):
    def make():
        seen = []
        model = nn.Linear(8, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = torch.cat(parts(model(x).reshape(-1, 5), *([seen] if parts is kept else []))).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda i: (torch.randn(4, lengths[i], 8),), [model, seen])

    return make


@pytest.mark.parametrize("parts", ONE_COUNT)
def test_one_capture_serves_all_lengths_with_as_many_items(parts):
    report = parity(program(parts, LENGTHS), steps=len(LENGTHS), captures=2)
    assert not report.breaks


def test_another_number_of_items_is_another_capture():
    lengths = (30, 31, 33, 30, 34, 40, 31)
    parity(program(chunks, lengths), steps=len(lengths), captures=3)


def test_a_range_that_the_step_keeps_shows_its_bounds():
    parity(program(kept, LENGTHS[:4]), steps=4, captures=4)


def test_a_range_that_c_code_makes_is_one():
    def parts(x):
        return [x.sum()[None] * r.stop for r in list(map(range, [0], [len(x)], [128]))]

    parity(program(parts, LENGTHS[:4]), steps=4, captures=4)


def test_chunks_under_inductor():
    parity(program(chunks, LENGTHS), steps=len(LENGTHS), captures=2, backend="inductor")


def test_errors_are_pythons():
    def parts(x):
        return [x[i] for i in range(0, len(x), len(x) - len(x))]

    parity(program(parts, LENGTHS[:3]), steps=3, captures=None, whole=False)
