"""Memory is read after it is written and before it is overwritten: Inductor's scheduling bugs, and the check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sidefx_train
from sidefx_train.errors import SideFXWarning
from sidefx_train.switches import without
from tests.support.disk_cache import new_cache

Rows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]

ROWS: dict[str, Rows] = {
    "rows set": lambda bank, h, i: bank.__setitem__(i, h),
    "index_copy": lambda bank, h, i: bank.index_copy_(0, i, h),
    "index_add": lambda bank, h, i: bank.index_add_(0, i, h),
    "accumulated": lambda bank, h, i: bank.index_put_((i,), h, accumulate=True),
    "index_fill": lambda bank, h, i: bank.index_fill_(0, i, 0.5),
    "scatter": lambda bank, h, i: bank.scatter_(0, i[:, None].expand(-1, 6), h),
    "a slice": lambda bank, h, i: bank[2:5].copy_(h),
    "masked_fill": lambda bank, h, i: bank.masked_fill_(bank > 1, 0.25),
}

UPDATES: dict[str, Callable[[torch.Tensor], Any]] = {
    "roll": lambda bank: bank.copy_(bank.roll(1, 0)),
    "permuted": lambda bank: bank.copy_(bank[torch.arange(7, -1, -1)]),
    "lerp": lambda bank: bank.lerp_(bank.flip(0), 0.3),
    "sum": lambda bank: bank.add_(bank.flip(0)),
    "cat": lambda bank: bank.copy_(torch.cat([bank[3:], bank[:3]])),
    "running sum": lambda bank: bank.copy_(bank.cumsum(0)),
    "softmax": lambda bank: bank.copy_(bank.softmax(0)),
}


def _updated(h: torch.Tensor, i: torch.Tensor, *banks: torch.Tensor) -> None:
    """Writes rows of each bank, then all of it from other rows; every second one by way of a copy."""
    pairs = [(rows, update) for rows in ROWS.values() for update in UPDATES.values()]
    for number, ((rows, update), bank) in enumerate(zip(pairs, banks, strict=True)):
        target = bank.clone() if number % 2 else bank
        rows(target, h, i)
        update(target)
        if target is not bank:
            bank.copy_(target * 0.5)


def _banks() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 6, generator=generator) for _ in range(len(ROWS) * len(UPDATES))]


def test_rows_written_then_read_elsewhere():
    """An in-place write of a buffer that was read at another index: Inductor miscompiled some single pairs."""
    wanted, found = _banks(), _banks()
    step = sidefx_train.compile(_updated, fullgraph=True)
    for call in range(2):
        generator = torch.Generator().manual_seed(call)
        h, i = torch.randn(3, 6, generator=generator), torch.randperm(8, generator=generator)[:3]
        _updated(h, i, *wanted)
        step(h, i, *found)
        names = [f"{rows}, {update}" for rows in ROWS for update in UPDATES]
        for name, a, b in zip(names, wanted, found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def _rolled(bank: torch.Tensor, h: torch.Tensor, i: torch.Tensor) -> None:
    bank[i] = h
    bank.copy_(bank.roll(1, 0))


@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="from 2.15 on Inductor schedules it correctly")
def test_a_schedule_that_reads_what_is_written_over_is_not_used(tmp_path, monkeypatch):
    """Without the workaround the check refuses the graph, and the step runs eagerly."""
    new_cache(tmp_path, monkeypatch)
    h, i = torch.randn(3, 6), torch.tensor([0, 5, 2])
    bank, expected = torch.ones(8, 6), torch.ones(8, 6)
    _rolled(expected, h, i)
    step = sidefx_train.compile(_rolled)
    with without("mutations_by_index"), pytest.warns(SideFXWarning, match="SFX201"):
        step(bank, h, i)
    assert torch.equal(bank, expected)
    assert [fallback.code for fallback in step.report().fallbacks] == ["SFX201"]
    assert "places" in step.report().fallbacks[0].reason


def _segmentation(depth: int, channels: int, loss: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    torch.manual_seed(0)
    conv, norm = getattr(nn, f"Conv{depth}d"), getattr(nn, f"BatchNorm{depth}d")
    net = nn.Sequential(
        conv(3, 8, 3, padding=1), norm(8), nn.ReLU(), conv(8, channels, 3, padding=1), norm(channels), nn.ReLU()
    )

    def step(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        value = loss(net(x))
        value.backward()
        return value.detach()

    return net, step


LOSSES = {
    "dice": lambda y: 1 - (2 * y.softmax(1)[:, 0].sum() + 1) / (y.softmax(1).sum() + 100),
    "cross entropy": lambda y: F.cross_entropy(y, torch.ones(y.shape[0], *y.shape[2:], dtype=torch.long)),
    "weighted": lambda y: (y.softmax(1) * y).flatten(2).sum(2).square().mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("depth", "channels"), [(2, 2), (2, 19), pytest.param(3, 2, marks=pytest.mark.slow)])
@pytest.mark.every(3)
def test_gradients_behind_a_softmax_over_channels(depth, channels, loss):
    """Sums per channel over whole vectors of positions: the remaining channels do not fill a vector."""
    wanted, eager = _segmentation(depth, channels, LOSSES[loss])
    found, step = _segmentation(depth, channels, LOSSES[loss])
    step = sidefx_train.compile(step, fullgraph=True)
    size = (2, 3, *[32 if depth == 2 else 8] * depth)
    for call in range(2):
        x = torch.rand(size, generator=torch.Generator().manual_seed(call))
        torch.testing.assert_close(step(x), eager(x), rtol=1e-4, atol=1e-5)
        most = max(p.grad.norm().item() for p in wanted.parameters())  # gradients before a norm are only rounding error
        for (name, a), b in zip(wanted.named_parameters(), found.parameters(), strict=True):
            off = (a.grad - b.grad).norm().item()
            assert off <= 1e-4 * most, f"{name}: {off:.2g} off, the largest norm is {most:.2g}"


@pytest.mark.parametrize("dims", [2, 3])
def test_a_convolution_after_one_with_a_single_output_channel(dims):
    """Its image is both channels-last and contiguous: the next layer uses the planned format."""
    conv = getattr(F, f"conv{dims}d")
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, 16, *(8, 5, 7)[-dims:], generator=draw).requires_grad_()
    first = torch.randn(1, 16, *[2] * dims, generator=draw).requires_grad_()
    second = torch.randn(18, 1, *[3] * dims, generator=draw)

    def gradients(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(conv(conv(F.elu(x), first), second).square().mean(), (x, first))

    step = sidefx_train.compile(gradients, autotune="off", verify=0, fullgraph=True)
    for have, wanted in zip(step(x, first, second), gradients(x, first, second), strict=True):
        torch.testing.assert_close(have, wanted, rtol=1e-4, atol=1e-5)


def _glued(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = F.silu(x)
    whole = torch.cat([v, y], -1)
    w = v.clone()
    w[i] = 1.0
    return F.glu(whole, -1), F.softmax(w @ w.mT, -1) @ w, whole


def _put(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = x * 2
    return torch.cat([v, y], -1), v.index_put((i,), torch.tensor(1.0))


@pytest.mark.parametrize("step", [_glued, _put])
def test_a_copy_of_what_lies_in_a_concatenation_is_written(step):
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, 16, 24, generator=draw) for _ in range(2))
    i = torch.tensor([1, 5, 2])
    for have, wanted in zip(sidefx_train.compile(step, verify=0)(x, y, i), step(x, y, i), strict=True):
        torch.testing.assert_close(have, wanted)
