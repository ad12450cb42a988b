"""Sums over the rows of large matrices, block by block."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import sidefx_train
from sidefx_train.compile.backend.passes import blocked_row_sums

SUMS = {
    "a matrix": lambda x: x.sum(0),
    "its dimension kept": lambda x: x.sum(0, keepdim=True),
    "more dimensions": lambda x: x.view(4, -1, 32).sum((0, 1)),
    "counted from the end": lambda x: x.view(4, -1, 32).sum((-3, -2), keepdim=True),
    "what is computed": lambda x: (x * 2 + 1).sum(0) * 3,
}
OTHERS = {
    "over the columns": lambda x: x.sum(1),
    "over all": lambda x: x.sum((0, 1)),
    "one of two leading dimensions": lambda x: x.view(4, -1, 32).sum(0),
    "stored by columns": lambda x: x.t().contiguous().t().sum(0),
    "a number of rows without a divisor": lambda x: x[:127].sum(0),
    "few columns": lambda x: x.view(-1, 8).sum(0),
    "another type": lambda x: x.sum(0, dtype=torch.float64),
}


def rewritten(net, x):
    module = make_fx(net, tracing_mode="fake")(x)
    mode = next(n.meta["val"].fake_mode for n in module.graph.nodes if "val" in n.meta)
    assert isinstance(mode, FakeTensorMode)
    return module, blocked_row_sums.sum_by_blocks(module, mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_what_they_were(name, dtype, monkeypatch):
    monkeypatch.setattr(blocked_row_sums, "_FEWEST", 4096)
    torch.manual_seed(0)
    x = torch.randn(128, 32, dtype=dtype)
    module, note = rewritten(SUMS[name], x)
    assert note == "1 sums over rows block by block"
    have, want = module(x), SUMS[name](x)
    assert have.dtype == want.dtype and have.shape == want.shape and have.stride() == want.stride()
    torch.testing.assert_close(have, want, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name, monkeypatch):
    monkeypatch.setattr(blocked_row_sums, "_FEWEST", 1000)
    assert rewritten(OTHERS[name], torch.randn(128, 32))[1] == ""


def test_small_ones_stay():
    assert rewritten(SUMS["a matrix"], torch.randn(1024, 512))[1] == ""
    assert rewritten(SUMS["a matrix"], torch.randn(2048, 512))[1] != ""


def test_a_step_with_a_large_layer_norm():
    grads = []
    for compiled in (False, True):
        torch.manual_seed(0)
        norm, linear = nn.LayerNorm(512), nn.Linear(512, 512)

        def step(x, norm=norm, linear=linear):
            loss = linear(norm(x)).square().mean()
            loss.backward()
            return loss.detach()

        run = sidefx_train.compile(step, fullgraph=True) if compiled else step
        run(torch.randn(4, 512, 512))
        grads.append([each.grad for each in (*norm.parameters(), *linear.parameters())])
    for have, want in zip(*grads, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-7)
    assert "3 sums over rows block by block" in run.report().captures[0].notes
