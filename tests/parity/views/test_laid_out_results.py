"""A view or a copy, as eager's layout of a result says: a write to ``reshape`` of it shows which."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import sidefx_train

MADE = {
    "normalized": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True),
    "signed": lambda x: torch.copysign(x[0].t(), x[0, 0, 0]).t(),
    "a power of a number": lambda x: 2 ** x[0].t(),
    "rounded": lambda x: torch.div(x[0].t(), 0.3, rounding_mode="floor").t(),
    "one hot": lambda x: F.one_hot((x[0] > 0).long().t(), 2),
    "saturated": lambda x: F.logsigmoid(x[0].t()),
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_write_to_a_reshaped_result(backend):
    """Regression: where torch lays out a fake result differently, the write was lost, or visible where it should not
    be."""

    def step(x):
        results = [make(x) for make in MADE.values()]
        for result in results:
            result.reshape(-1).mul_(3)
        return results

    compiled = sidefx_train.compile(step, backend=backend, fullgraph=True)
    for _ in range(2):
        x = torch.randn(3, 5, 4)
        for name, a, b in zip(MADE, step(x), compiled(x), strict=True):
            torch.testing.assert_close(a, b, msg=name)
            assert a.stride() == b.stride(), name
