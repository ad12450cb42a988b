"""Decomposed attention computes the results of the fused kernel; unsupported cases stay fused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.autotune import attention
from tests.support.disk_cache import new_cache


class Mixer(nn.Module):
    def __init__(self, causal, mask=False, contiguous=False):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.causal, self.contiguous = causal, contiguous
        self.mask = torch.zeros(6, 6).masked_fill(torch.rand(6, 6) > 0.7, -1.0) if mask else None

    def forward(self, x):
        q, k, v = (t.view(2, 6, 4, 4).transpose(1, 2) for t in self.qkv(x).split(16, 2))
        if self.contiguous:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.causal)
        return y.transpose(1, 2).reshape(2, 6, 16)


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    new_cache(tmp_path, monkeypatch)  # cached graphs that were lowered with other timings are not used
    monkeypatch.setattr(attention, "timings", lambda tasks: dict.fromkeys(tasks, {"fused": 1.0, "products": 0.1}))
    with compat.inductor_options({"cpp_cache_precompile_headers": False}):
        yield


def trained(model, compiled):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = sidefx_train.compile(step, fullgraph=True) if compiled else step
    losses = [run(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    return losses, [p.detach().clone() for p in model.parameters()], run


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.every(2)
def test_equal_to_the_fused_kernel(chosen, causal, contiguous):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        results.append(trained(Mixer(causal, contiguous=contiguous), compiled))
    for a, b in zip(results[0][0] + results[0][1], results[1][0] + results[1][1], strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()
    report = results[1][2].report()
    assert "1 of 1 attentions as matrix products" in report.captures[0].notes
    assert "flash" not in report.sources()["graph"]


def test_a_mask_tensor_stays_fused(chosen):
    torch.manual_seed(0)
    _, _, run = trained(Mixer(False, mask=True), True)
    assert not any("attentions" in note for note in run.report().captures[0].notes)
    assert "flash" in run.report().sources()["graph"]


def test_a_forward_without_its_backward_stays_fused(chosen):
    """A model compiled alone: its backward is a separate graph that reads the log-sum-exp."""
    torch.manual_seed(0)
    model = Mixer(True)
    x = torch.randn(2, 6, 16)
    call = sidefx_train.compile(model, fullgraph=True)
    wanted, found = model(x), call(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    (a,), (b,) = (torch.autograd.grad(y.square().sum(), [model.qkv.weight]) for y in (wanted, found))
    torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


EACH_PAIR = [("wide", False, False), ("wide", True, True), ("tiles", False, True), ("tiles", True, False)]
"""Combinations of way, contiguous and autocast in which each pair of values occurs."""
ALL_THREE = [
    pytest.param(*given, marks=[] if given in EACH_PAIR else pytest.mark.slow)
    for given in itertools.product(("wide", "tiles"), (False, True), (False, True))
]


@pytest.mark.parametrize(("way", "contiguous", "autocast"), ALL_THREE)
@pytest.mark.every(4)
def test_bfloat16_attention_on_float32_numbers(chosen, monkeypatch, way, contiguous, autocast):
    note = {"wide": "in float32", "tiles": "as matrix products"}[way]
    times = lambda tasks: dict.fromkeys(tasks, {"fused": 1.0, way: 0.1})  # noqa: E731
    monkeypatch.setattr(attention, "timings", times)
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Mixer(True, contiguous=contiguous)
        given = model if autocast else model.bfloat16()
        call = lambda x, m=given: m(x if autocast else x.bfloat16())  # noqa: E731
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, call=call, optimizer=optimizer):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = call(x).float().square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = sidefx_train.compile(step, fullgraph=True) if compiled else step
        losses = [run(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(i))) for i in range(2)]
        results.append(losses + [p.detach() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype and (a - b).float().norm() <= 2e-2 * a.float().norm()
    assert f"1 of 1 attentions {note}" in run.report().captures[0].notes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_forms_are_measured(dtype):
    found = attention._measure([1, 2, 8, 4], True, 1, dtype)
    wanted = {"fused", "native", "products", "tiles"} | ({"wide"} if dtype == "bfloat16" else set())
    assert set(found) == wanted and all(0 < seconds < 1 for seconds in found.values())


def test_weights_that_take_much_memory_are_not_held():
    assert set(attention._measure([1, 64, 128, 32], True, 1, "bfloat16")) == {"fused", "native", "wide"}


def test_of_a_large_attention_a_part_is_measured():
    assert attention._part([8, 16, 1024, 64], 2) == ([1, 2, 1024, 64], None)
    assert attention._part([4, 4, 32, 16], 2) == ([4, 4, 32, 16], None)
    assert attention._part([1, 2, 8192, 64], 2) == ([1, 2, 1024, 64], None)
    assert attention._part([1, 2, 8192, 64], 2, 1024) == ([1, 2, 1024, 64], 1024)
    assert attention._part([1, 2, 256, 64], 2, 65536) == ([1, 2, 256, 64], 4096)
