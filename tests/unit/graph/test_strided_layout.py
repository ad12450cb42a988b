"""Questions about sizes and strides."""

from __future__ import annotations

import pytest
import torch

from sidefx_train.compile.graph.strided_layout import (
    extent,
    fills_its_range,
    is_dense,
    is_dense_in,
    is_static,
    last_offset,
)

BASE = torch.zeros(4, 3, 5)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (BASE, True),
        (BASE.permute(2, 0, 1), True),
        (BASE[1:3], True),
        (BASE[:, 1:2], False),
        (BASE[..., ::2], False),
        (BASE.select(2, 0), False),
        (torch.zeros(1, 3).as_strided((1, 3), (17, 1)), True),
        (torch.zeros(()), True),
        (torch.zeros(3).expand(2, 3), False),
    ],
)
def test_dense_tensors(tensor, dense):
    assert is_dense(tensor) is dense
    memory_order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]), reverse=True)
    assert is_dense_in(tensor, memory_order) is dense
    assert is_static(tensor)


def test_dense_in_one_order_only():
    channels_last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert is_dense_in(channels_last, [0, 2, 3, 1])
    assert not is_dense_in(channels_last, [0, 1, 2, 3])


def test_extents():
    part = BASE[1, 1:, ::2]
    assert last_offset(part) == 5 + 4
    assert extent(part) == (4 * 20, 4 * 30)
    assert not fills_its_range(part)
    assert fills_its_range(BASE.transpose(0, 2))
