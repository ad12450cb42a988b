"""Operators that generated C++ calls through torch's dispatcher."""

from __future__ import annotations

import logging

import torch
from torch import nn

import sidefx_train


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
