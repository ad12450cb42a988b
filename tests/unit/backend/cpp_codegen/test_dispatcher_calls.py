"""Operators that generated C++ calls through torch's dispatcher."""

from __future__ import annotations

import logging
import resource

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from sidefx_train.compile.backend.passes import keep_composite_ops
from tests.support.disk_cache import new_cache


def test_they_are_in_the_report_and_nothing_is_logged(caplog):
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(30, 8, mode="mean")
    words = torch.randint(0, 30, (12, 5))

    def step():
        bag.weight.grad = None
        bag(words).square().sum().backward()
        return bag.weight.grad

    compiled = sidefx_train.compile(step)
    with caplog.at_level(logging.WARNING, logger="torch._inductor"):
        torch.testing.assert_close(compiled(), step())
    assert not [r for r in caplog.records if "c-shim" in r.getMessage()]
    (notes,) = [capture.notes for capture in compiled.report().captures]
    assert any("called through torch's dispatcher: aten._embedding_bag_backward.default" in note for note in notes)


CALLED = {
    "lists of integers and nothing": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "numbers or nothing": lambda x: F.interpolate(x, scale_factor=0.5, mode="bicubic", antialias=True),
    "an empty list": lambda x: torch.roll(x, 77) * 2,
    "lists of booleans": lambda x: F.layer_norm(x, (64, 64), None, torch.ones(64, 64)),
    "a number, and several results": lambda x: torch.linalg.svd(x[:, :, :4, :4])[1],
    "a list of tensors": lambda x: torch.cartesian_prod(x[0, 0, 0], x[0, 0, 1]).sum(1),
}


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.every(2)
def test_called_without_torchs_headers(name, tmp_path, monkeypatch):
    new_cache(tmp_path, monkeypatch)
    monkeypatch.setattr(keep_composite_ops, "_FEWEST", 64)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64, requires_grad=True)

    def step():
        x.grad = None
        out = CALLED[name](x)
        out.square().sum().backward()
        return out.detach(), x.grad

    compiled = sidefx_train.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(), step(), rtol=1e-4, atol=1e-5)
    (capture,) = compiled.report().captures
    assert "IValue" not in compiled.report().sources()["inductor"]
    assert not any("failed" in note for note in capture.notes)


def test_arguments_of_dispatcher_calls_are_freed(tmp_path, monkeypatch):
    new_cache(tmp_path, monkeypatch)
    monkeypatch.setattr(keep_composite_ops, "_FEWEST_WINDOWS", 1)
    compiled = sidefx_train.compile(
        lambda x: F.interpolate(x.flip(3), scale_factor=2, mode="bilinear"), fullgraph=True, keep_slower=True
    )
    x = torch.randn(1, 1, 64, 64)
    for _ in range(20):
        compiled(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3000):
        compiled(x)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000, "KiB; an image has 80"


def test_the_same_where_the_environment_says_ci(monkeypatch):
    """Inductor then refuses to call operators that have a decomposition."""
    from torch._inductor import lowering

    monkeypatch.setenv("CI", "true")
    monkeypatch.delitem(lowering.lowerings, torch.ops.aten.upsample_bilinear2d.default, raising=False)
    x = torch.randn(1, 1, 8, 8)

    def step():
        return F.interpolate(x, scale_factor=2, mode="bilinear")

    torch.testing.assert_close(sidefx_train.compile(step, fullgraph=True)(), step())
