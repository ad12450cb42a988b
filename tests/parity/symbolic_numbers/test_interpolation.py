"""``F.interpolate`` of batches and images whose sizes change: one capture after the first change, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sidefx_train

OPTIONS = [
    {"size": (7, 8)},
    {"scale_factor": 2},
    {"scale_factor": (2, 3), "mode": "nearest-exact"},
    {"scale_factor": 2.0, "recompute_scale_factor": True},
    {"size": 5, "mode": "bilinear", "antialias": True},
]


@pytest.mark.parametrize("images", [False, True], ids=["batch", "images"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_sizes_that_change(options, images):
    def step(x):
        x = x.clone().requires_grad_()
        made = F.interpolate(x, **options)
        made.square().sum().backward()
        return made.detach(), x.grad

    captured = sidefx_train.compile(step, backend="eager")
    for n in (4, 3, 5, 6):
        x = torch.randn(n, 2, *((n + 2, 2 * n) if images else (4, 6)), generator=torch.Generator().manual_seed(n))
        for wanted, made in zip(step(x), captured(x), strict=True):
            assert torch.equal(wanted, made) and wanted.stride() == made.stride()
    report = captured.report()
    assert report.replays == 4 and len(report.captures) == 2 and not report.breaks


@pytest.mark.parametrize("options", [{"size": 3, "scale_factor": 2}, {"mode": "none"}, {"scale_factor": (1, 2, 3)}])
def test_arguments_that_torch_refuses(options):
    captured = sidefx_train.compile(lambda x: F.interpolate(x, **options), backend="eager", dynamic=True)
    for n in (2, 3):
        with pytest.raises((ValueError, NotImplementedError)):
            captured(torch.ones(n, 1, 4, 4))
