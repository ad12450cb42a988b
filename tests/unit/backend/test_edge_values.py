"""Inductor's code is right for values that its first run, which is compared with the captured graph, did not have."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import sidefx_train

INF, NAN = math.inf, math.nan
QUOTIENTS = {
    "floor": lambda x, y: x // y,
    "floor of a number": lambda x, y: torch.div(x, 0.1, rounding_mode="floor"),
    "remainder": lambda x, y: x % y,
    "remainder of a number": lambda x, y: torch.remainder(x, 0.1),
    "number over": lambda x, y: torch.remainder(7.5, y),
    "narrow": lambda x, y: (x.bfloat16() // y.bfloat16(), x.half() % 0.1),
    "narrow by numbers": lambda x, y: (x.half() // 0.1, 7.5 % y.bfloat16(), x.bfloat16() % 0.3),
    "doubles": lambda x, y: (x.double() // y, x.double() % y),
}
OTHERS = {
    "product with zero": lambda x, y: x * 0,
    "sum with an unused product": lambda x, y: y + 0 * x.sum(),
    "softshrink": lambda x, y: F.softshrink(x),
    "logarithm of expm1": lambda x, y: torch.log(torch.expm1(x)),
    "elu": lambda x, y: F.elu(x),
    "atanh": lambda x, y: torch.atanh(x),
    "reciprocal root": lambda x, y: x**-0.5,
}


@pytest.mark.parametrize("functions", [QUOTIENTS, OTHERS], ids=["quotients", "others"])
def test_values_at_the_edges_after_plain_ones(functions):
    """Regression: ``1.0 // 0.1`` was 10 and ``1e10 % 0.7`` 0; ``NaN * 0`` was 0, and so was ``expm1(1e-8)``."""

    def step(x, y):
        return [function(x, y) for function in functions.values()]

    compiled = sidefx_train.compile(step, rng="eager", warmup="now", fullgraph=True)
    compiled(torch.rand(48) + 1, torch.rand(48) + 1)
    x = torch.tensor([1.0, 6.0, -0.3, 1e-8, 5e8, 1e10, -7.0, 0.9, INF, -INF, NAN, 0.0]).repeat(4)
    y = torch.tensor([0.1, 0.1, 0.1, 0.3, 0.1, 0.7, 2.0, -0.3, 2.0, 1.0, 1.0, 3.0]).repeat(4)
    tiny = torch.tensor([1e-8, -1e-8, 1e-30, -0.0]).repeat(12)
    for inputs in ((x, y), (-x, y), (x, -y), (tiny, y), (x, y * 0)):
        for name, found, wanted in zip(functions, compiled(*inputs), step(*inputs), strict=True):
            close = torch.testing.assert_close
            close(found, wanted, rtol=1e-5, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
    assert compiled.report().replays


def test_windows_of_minus_infinity():
    """Regression: the maximum was found in the padding, and the backward wrote outside of the gradient's memory."""
    pools = {
        "rows": lambda x: F.max_pool1d(x[0], 3, 2, 1),
        "images": lambda x: F.max_pool2d(x, 3, 2, 1),
        "dilated": lambda x: F.max_pool2d(x, 2, 1, 1, dilation=2),
        "volumes": lambda x: F.max_pool3d(x[None], 3, 2, 1, ceil_mode=True),
        "without padding": lambda x: F.max_pool2d(x, 2),
    }

    def step(x):
        x = x.detach().requires_grad_()
        found = [pool(x) for pool in pools.values()]
        gradients = torch.autograd.grad(sum(values.exp().sum() + values.clamp(min=0).sum() for values in found), x)
        return *found, *gradients, F.max_pool2d(x, 3, 2, 1, return_indices=True)[1]

    compiled = sidefx_train.compile(step, rng="eager", warmup="now", fullgraph=True)
    compiled(torch.rand(2, 3, 7, 6))
    for rows in (1, 4, 7):
        x = torch.randn(2, 3, 7, 6)
        x[:, :2, :rows] = -INF
        for found, wanted in zip(compiled(x), step(x), strict=True):
            torch.testing.assert_close(found, wanted)
    assert compiled.report().replays


def test_any_of_bytes():
    """Regression: it was a ``bool``, and 200 more than it an integer of 64 bits."""

    def step(x):
        return x.any(), x.any(0), x.any((0, 1), keepdim=True), x.any(1) + 200, x.all(), x.bool().any(0)

    x = torch.tensor([[0, 0, 3], [0, 2, 0]], dtype=torch.uint8)
    compiled = sidefx_train.compile(step, fullgraph=True, verify=0)
    for found, wanted in zip(compiled(x), step(x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce", [None, "sum"])
def test_scatter_and_its_gradients_in_one_graph(reduce, dtype):
    """Regression: the step ran eagerly, since the C++ of its loop could not be compiled."""
    columns = torch.stack([torch.randperm(7) for _ in range(7)], 1)

    def step(x, source, weight):
        more = () if reduce is None else (reduce,)
        made = (x.scatter if reduce is None else x.scatter_reduce)(0, columns, source, *more)
        (made * weight).sum().backward()
        return made.detach()

    compiled, results = sidefx_train.compile(step, on_failure="raise", verify=0), []
    for run in (step, compiled):
        torch.manual_seed(0)
        x, source, weight = (torch.randn(7, 7, dtype=dtype) for _ in range(3))
        results.append([run(x.requires_grad_(), source.requires_grad_(), weight), x.grad, source.grad])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradient_of_a_small_soft_margin_loss(reduction):
    """Regression: it had the digits of 1 only, and was 0 from a margin of 17 on."""
    x = torch.linspace(-20, 60, 48)
    target = torch.where(torch.arange(48) % 3 == 0, -1.0, 1.0)

    def step(x):
        return torch.autograd.grad(F.soft_margin_loss(x, target, reduction=reduction).sum(), x)[0]

    compiled = sidefx_train.compile(step, fullgraph=True, verify=0)
    torch.testing.assert_close(
        compiled(x.clone().requires_grad_()), step(x.clone().requires_grad_()), rtol=1e-5, atol=0
    )


NORMS = {
    "layer": lambda x, w, eps: F.layer_norm(x, (6,), w, w, eps),
    "layer without weights": lambda x, w, eps: F.layer_norm(x, (6,), None, None, eps),
    "group": lambda x, w, eps: F.group_norm(x, 3, w, w, eps),
    "batch": lambda x, w, eps: F.batch_norm(x, None, None, w, w, True, 0.1, eps),
    "batch by statistics": lambda x, w, eps: F.batch_norm(x, w.detach(), w.detach() + 1, w, w, False, 0.1, eps),
}


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.every(2)
def test_norms_of_half_precision_with_a_changing_number(weights):
    """Regression: their statistics were read in another dtype than the kernel's, and gradients were any numbers."""

    def step(x, w, eps):
        made = [norm(x, w, eps) for norm in NORMS.values()]
        sum((each * torch.arange(6)).float().sum() for each in made).backward()
        return [each.detach() for each in made]

    compiled, results = sidefx_train.compile(step, on_failure="raise", verify=0, warmup="now"), []
    for run in (step, compiled):
        torch.manual_seed(0)
        for eps in (0.5, 0.6, 0.7):
            x, w = torch.randn(4, 6, dtype=torch.bfloat16), torch.rand(6, dtype=weights)
            results.append([*run(x.requires_grad_(), w.requires_grad_(), eps), x.grad, w.grad])
    torch.testing.assert_close(results[3:], results[:3], rtol=3e-2, atol=3e-2)
    assert compiled.report().replays
