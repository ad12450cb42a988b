"""Operators whose numbers are 0-dim tensors: fake tensors give their sizes, whatever numbers they accept."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sidefx_train.compile.ops.number_operators import call_with_tensors

aten = torch.ops.aten


@pytest.mark.parametrize(
    "op, args",
    [
        (aten.geometric.default, (torch.ones(2, 3), 0.25)),
        (aten.bernoulli.p, (torch.ones(2, 3), 0.25)),
        (aten.native_dropout.default, (torch.ones(2, 3), 0.25, True)),
        (aten.multi_margin_loss.default, (torch.ones(2, 3), torch.tensor([0, 2]), 1, 0.7)),
        (aten.multi_margin_loss.default, (torch.ones(2, 3), torch.tensor([0, 2]), 2, 0.7)),
        (aten._cdist_forward.default, (torch.ones(2, 3), torch.ones(4, 3), 2.5, None)),
        (aten.renorm.default, (torch.ones(2, 3), 3.0, 0, 0.5)),
    ],
    ids=lambda value: value._schema.name.removeprefix("aten::") if hasattr(value, "_schema") else "",
)
def test_sizes_need_no_value(op, args):
    wanted = op(*args)
    with FakeTensorMode() as mode:
        numbers = [torch.full((), value, dtype=torch.float64) if type(value) is float else value for value in args]
        fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in numbers]
        found = call_with_tensors(op, tuple(fakes), {})
    for want, have in zip(*((each if isinstance(each, tuple) else (each,)) for each in (wanted, found)), strict=True):
        assert (want.shape, want.dtype) == (have.shape, have.dtype)
