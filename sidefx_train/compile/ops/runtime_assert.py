"""Conditions on tensors that are taken for granted: the graph checks them, and a step that meets another runs eagerly.

A graph cannot branch on what it computes. Where one side of a branch only raises (``capture/raising.py``), or the
condition asks whether something is not finite (``heap/finite.py``), the other side is captured, and a node of the graph
says what was taken for granted. Nothing that the step changes is kept where that does not hold.
"""

from __future__ import annotations

import torch
from torch import fx

from sidefx_train.errors import NotGranted

_library = torch.library.Library("sidefx", "FRAGMENT")
_library.define("granted(Tensor condition, bool holds) -> ()")


def _granted(condition: torch.Tensor, holds: bool) -> None:
    if bool(condition) != holds:
        raise NotGranted()


_library.impl("granted", _granted, "CompositeExplicitAutograd")
torch.library.register_fake("sidefx::granted", lambda condition, holds: None, lib=_library)

GRANTED = torch.ops.sidefx.granted.default
"""``granted(condition, holds)`` raises :class:`~sidefx_train.errors.NotGranted` where ``bool(condition) != holds``."""


def take_for_granted(condition: torch.Tensor, holds: bool) -> None:
    """Records that a tensor of one element is true, or false."""
    GRANTED(condition.detach(), holds)


def conditions(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that say what is taken for granted."""
    return [node for node in graph.nodes if node.target is GRANTED]
