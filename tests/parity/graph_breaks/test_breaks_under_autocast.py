"""Breaks inside autocast regions: each part casts as eager does, and the thread's autocast state is eager's always."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.graph_breaks import failing, outside
from tests.support.parity import Program, batches, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")

_Forward = Callable[[nn.ModuleList, torch.Tensor, list], torch.Tensor]


def seen() -> list[object]:
    """Returns the thread's autocast state; the number of regions by entering one more."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    dtype = torch.get_autocast_dtype("cpu")
    return [torch.is_autocast_enabled("cpu"), dtype, torch.is_autocast_cache_enabled(), depth, torch.is_grad_enabled()]


def one_region(layers, x, log):
    with torch.autocast("cpu", torch.bfloat16):
        y = layers[0](x)
        log.append(outside(y.detach().sum()))
        y = layers[1](y)
        log.append(y.dtype)
    return layers[2](y.float())


def disabled_inside(layers, x, log):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = layers[0](x)
        with torch.autocast("cpu", enabled=False):
            y = layers[1](y.float())
            log.append(outside(y.detach().sum()))
            log.append(y.dtype)
        y = layers[2](y)
        log.append(outside(y.detach().sum()))
    return y.float()


def in_a_loop(layers, x, log):
    with torch.autocast("cpu", torch.bfloat16):
        for layer in layers:
            x = layer(x)
            log.append(outside(x.detach().sum()))
    return x.float()


def without_grad(layers, x, log):
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            x = layers[0](x)
            log.append(outside(x.sum()))
        y = layers[1](x)
    return layers[2](y.float())


def left_by_an_error(layers, x, log):
    try:
        with torch.autocast("cpu", torch.bfloat16):
            y = layers[0](x)
            failing(y.detach().sum().abs() + 1)
    except ValueError:
        log.append(seen())
    return layers[1](y.float())


def entered_by_hand(layers, x, log):
    region = torch.autocast("cpu", torch.bfloat16)
    region.__enter__()
    y = layers[0](x)
    log.append(outside(y.detach().sum()))
    region.__exit__(None, None, None)
    log.append(seen())
    return layers[1](y.float())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "forward", [one_region, disabled_inside, in_a_loop, without_grad, left_by_an_error, entered_by_hand]
)
@pytest.mark.every(3)
def test_a_break_under_autocast(forward: _Forward, inside: bool):
    def make() -> Program:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
        log: list[object] = []

        def step(x, y):
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                loss = forward(layers, x, log).square().mean()
                log.append(seen())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.append(seen())
            return loss

        return Program(step, batches((5, 6), classes=3), (layers, optimizer, log))

    before = seen()
    report = parity(make, whole=False, captures=None)
    assert report.breaks and report.parts and not report.fallbacks
    assert seen() == before
