"""Runtime asserts: the graph checks assumed conditions on tensors; a step whose assumption fails runs eagerly.

A graph cannot branch on its results. If one side of a branch only raises (``opcodes/raising_branches.py``), or the
condition tests for non-finite numbers (``recording/finiteness_tests.py``), the other side is captured, and a node of
the graph asserts the condition. If it does not hold, none of the step's changes is kept.
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
    """Records the assumption that a one-element tensor is true, or false."""
    RUNTIME_ASSERT(condition.detach(), holds)


def conditions(graph: fx.Graph) -> list[fx.Node]:
    """Returns the runtime assert nodes."""
    return [node for node in graph.nodes if node.target is RUNTIME_ASSERT]
