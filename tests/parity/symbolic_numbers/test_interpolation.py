"""``F.interpolate`` of batches and images whose sizes change, or by factors that do: one
capture after the first change, bit for bit."""

from __future__ import annotations

import random
import re

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
    {"size": (5, 9), "mode": "bilinear", "align_corners": True},
    {"scale_factor": 0.5, "mode": "bilinear"},
    {"scale_factor": 0.37, "mode": "bilinear"},
    {"scale_factor": (1.5, 2.25), "mode": "bicubic"},
    {"size": 5, "mode": "bicubic", "antialias": True},
    {"scale_factor": 2, "mode": "area"},
]
OTHER_DIMENSIONS = [
    (1, {"size": 7}),
    (1, {"scale_factor": 1.5, "mode": "nearest-exact"}),
    (1, {"size": 7, "mode": "linear", "align_corners": True}),
    (1, {"scale_factor": 2, "mode": "linear"}),
    (3, {"scale_factor": 2}),
    (3, {"size": 3, "mode": "nearest-exact"}),
    (3, {"size": (3, 4, 5), "mode": "trilinear"}),
]


@pytest.mark.parametrize("images", [False, True], ids=["batch", "images"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.every(4)
def test_sizes_that_change(options, images):
    check(options, lambda n: (n, 2, *((n + 3, 2 * n) if images else (4, 6))))


def test_a_height_of_one_has_a_capture_of_its_own_like_every_size_of_one():
    check({"scale_factor": 0.37, "mode": "bilinear"}, lambda n: (n, 2, n + 2, 2 * n), captures=3)


def check(options, size, memory_format=torch.contiguous_format, captures=2):
    def step(x):
        x = x.clone().requires_grad_()
        made = F.interpolate(x, **options)
        made.square().sum().backward()
        return made.detach(), x.grad

    captured = sidefx_train.compile(step, backend="eager")
    for n in (4, 3, 5, 6):
        x = torch.randn(size(n), generator=torch.Generator().manual_seed(n)).contiguous(memory_format=memory_format)
        for wanted, made in zip(step(x), captured(x), strict=True):
            assert torch.equal(wanted, made) and wanted.stride() == made.stride()
    report = captured.report()
    assert report.replays == 4 and len(report.captures) == captures and not report.breaks


@pytest.mark.parametrize(("dimensions", "options"), OTHER_DIMENSIONS)
@pytest.mark.every(2)
def test_sizes_of_sequences_and_volumes(dimensions, options):
    check(options, lambda n: (n, 2, *(n, 3, n + 2)[:dimensions]))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_memory_format(mode):
    check({"size": 5, "mode": mode}, lambda n: (n, 3, 4, 5), torch.channels_last)


def test_size_that_depends_on_data():
    def step(x, lengths):
        x = x.clone().requires_grad_()
        made = F.interpolate(x[:, :, : int(lengths.max())], 6, mode="linear", align_corners=True)
        made.square().sum().backward()
        return made.detach(), x.grad

    captured = sidefx_train.compile(step, backend="eager")
    for n in (3, 5, 4):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(n))
        for wanted, made in zip(step(x, torch.tensor([2, n])), captured(x, torch.tensor([2, n])), strict=True):
            assert torch.equal(wanted, made) and wanted.stride() == made.stride()
    assert len(captured.report().captures) == 1 and not captured.report().breaks


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[5], OPTIONS[-1]])
def test_crop_at_a_random_place(options):
    """Its sizes are plain numbers, its place in memory is not."""

    def step(x, generator):
        top, left = generator.randint(0, 3), generator.randint(0, 3)
        return F.interpolate(x[..., top : top + 5, left : left + 6], **options)

    captured = sidefx_train.compile(step, backend="eager")
    for n in range(6):
        x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(n))
        wanted, made = step(x, random.Random(n)), captured(x, random.Random(n))
        assert torch.equal(wanted, made) and wanted.stride() == made.stride()
    assert len(captured.report().captures) == 1 and not captured.report().breaks


@pytest.mark.parametrize("options", [{"size": 3, "scale_factor": 2}, {"mode": "none"}, {"scale_factor": (1, 2, 3)}])
def test_arguments_that_torch_refuses(options):
    captured = sidefx_train.compile(lambda x: F.interpolate(x, **options), backend="eager", dynamic=True)
    for n in (2, 3):
        with pytest.raises((ValueError, NotImplementedError)):
            captured(torch.ones(n, 1, 4, 4))


MODES = [
    *((1, mode) for mode in ("nearest", "nearest-exact", "linear", "area")),
    *((2, mode) for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")),
    *((3, mode) for mode in ("nearest", "nearest-exact", "trilinear", "area")),
]


def scaled_steps(options, dimensions, backend):
    """Returns a step that scales by a factor, captured; and another one, which is not."""

    def step(weight, x, factor):
        made = F.interpolate(x * weight, scale_factor=factor, **options)
        (made * torch.arange(made.numel()).view(made.shape).sin()).sum().backward()
        with torch.no_grad():
            weight -= 0.01 * weight.grad
        weight.grad = None
        return made.detach()

    captured = sidefx_train.compile(step, backend=backend, keep_slower=True)
    weights = [torch.rand(2, 3, *[9] * dimensions, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    for weight in weights:
        weight.requires_grad_()
    return (step, weights[0]), (captured, weights[1])


@pytest.mark.parametrize("recomputed", [None, True])
@pytest.mark.parametrize(("dimensions", "mode"), MODES)
@pytest.mark.every(2)
def test_factor_that_changes(dimensions, mode, recomputed):
    options = {"mode": mode, "recompute_scale_factor": recomputed}
    (step, weight), (captured, captured_weight) = scaled_steps(options, dimensions, "eager")
    for n, factor in enumerate((1.3, 0.7, 1.0, 2.0, 1.21, 0.57, 0.731)):
        x = torch.randn(2, 3, *[9] * dimensions, generator=torch.Generator().manual_seed(n))
        wanted, made = step(weight, x, factor), captured(captured_weight, x, factor)
        assert torch.equal(wanted, made) and wanted.stride() == made.stride()
        assert torch.equal(weight, captured_weight)
    report = captured.report()
    assert report.replays == 7 and len(report.captures) == 2 and not report.breaks


@pytest.mark.parametrize(
    "options",
    [{"mode": "nearest"}, {"mode": "area"}, {"mode": "bicubic", "antialias": True}, {"mode": "bilinear"}],
    ids=lambda options: options["mode"],
)
@pytest.mark.every(2)
def test_factors_that_change_under_inductor(options):
    (step, weight), (captured, captured_weight) = scaled_steps(options, 2, "inductor")
    for n, factor in enumerate(((1.3, 0.7), (0.7, 0.8), (0.9, 0.54), (0.6, 1.21))):
        x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(n))
        torch.testing.assert_close(captured(captured_weight, x, factor), step(weight, x, factor), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weight, captured_weight, rtol=1e-5, atol=1e-5)
    report = captured.report()
    assert report.replays == 4 and len(report.captures) == 2 and not report.breaks


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "area"])
@pytest.mark.parametrize("factor", [0.05, -1.0, float("nan"), float("inf")])
def test_factor_that_torch_refuses(mode, factor):
    (step, weight), (captured, captured_weight) = scaled_steps({"mode": mode}, 2, "eager")
    x = torch.ones(2, 3, 9, 9)
    for each in (1.3, 0.7, 0.8):
        captured(captured_weight, x, each)
    with pytest.raises((RuntimeError, ValueError, OverflowError)) as wanted:
        step(weight, x, factor)
    with pytest.raises(wanted.type, match=re.escape(str(wanted.value))):
        captured(captured_weight, x, factor)
