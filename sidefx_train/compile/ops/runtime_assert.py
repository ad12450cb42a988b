"""Conditions on tensors that are taken for granted: the graph checks them, and a step that meets another runs eagerly.

A graph cannot branch on what it computes. Where one side of a branch only raises (``capture/raising.py``), or the
condition asks whether something is not finite (``heap/finite.py``), the other side is captured, and a node of the graph
says what was taken for granted. Nothing that the step changes is kept where that does not hold.
"""

from __future__ import annotations

import torch
from torch import fx

from sidefx_train.compile.ops.registration import define_operator
from sidefx_train.errors import AssumptionFailed


def _check(condition: torch.Tensor, holds: bool) -> None:
    if bool(condition) != holds:
        raise AssumptionFailed()


define_operator(
    "runtime_assert(Tensor condition, bool holds) -> ()",
    _check,
    lambda condition, holds: None,
    key="CompositeExplicitAutograd",
)

RUNTIME_ASSERT = torch.ops.sidefx.runtime_assert.default
"""``runtime_assert(condition, holds)`` raises ``AssumptionFailed`` where ``bool(condition) != holds``."""


def assume_condition(condition: torch.Tensor, holds: bool) -> None:
    """Records that a tensor of one element is true, or false."""
    RUNTIME_ASSERT(condition.detach(), holds)


def conditions(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that say what is taken for granted."""
    return [node for node in graph.nodes if node.target is RUNTIME_ASSERT]
