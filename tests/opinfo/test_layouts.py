"""Strides of fake results against real ones: a few operators of torch's list, and all of them."""

from __future__ import annotations

import pytest
import torch

from tests.opinfo.layouts import differences


def test_a_few():
    assert not list(differences(("nn.functional.elu", "nn.functional.hardtanh", "nn.functional.group_norm", "lerp")))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all(dtype):
    assert not list(differences(seed=11, dtype=dtype))
