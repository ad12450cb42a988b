"""Sums and products with zero that Inductor simplifies although they have another value."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from sidefx_train.torch_compat.inductor.patching import hidden, replaced


@contextmanager
def zero_products_computed() -> Iterator[None]:
    """Computes products with the integer 0.

    Upstream: they are replaced by zeros, so that a NaN is lost: in ``loss + 0 * unused.sum()``, or in ``softshrink``,
    whose decomposition multiplies by 0 to keep it. Seen with ``torch.compile`` in torch 2.13.
    """
    from torch._inductor.fx_passes import joint_graph

    with replaced(joint_graph.UniformValueConstantFolder, "_add_peephole_patterns", lambda before: lambda folder: None):
        yield


@contextmanager
def zero_sums_computed() -> Iterator[None]:
    """Computes sums with 0.0, which make 0.0 of -0.0.

    Upstream: ``x + zeros``, and from 2.14 on ``x + 0``, are replaced by ``x``: ``1 / (-0.0 + 0)`` is minus infinity.
    Seen with ``torch.compile`` in torch 2.13 to 2.15.
    """
    from torch._inductor.fx_passes import joint_graph

    def keeping_sums(before: Callable[..., Any]) -> Callable[..., Any]:
        def remove_no_ops(module: fx.GraphModule, zeros: Container[fx.Node], *args: Any) -> None:
            with hidden(_sums_with_zero(module.graph, zeros)):
                before(module, zeros, *args)

        return remove_no_ops

    with replaced(joint_graph, "remove_no_ops", keeping_sums):
        yield


def _sums_with_zero(graph: fx.Graph, zeros: Container[fx.Node]) -> list[fx.Node]:
    """Returns sums of floating-point tensors with 0.0, and differences with -0.0."""
    found = []
    for target, sign in ((torch.ops.aten.add.Tensor, 1), (torch.ops.aten.sub.Tensor, -1)):
        for node in graph.find_nodes(op="call_function", target=target):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
                signs = [_sign_of_zero(each, zeros) for each in (node.args if sign > 0 else node.args[1:])]
                if sign in signs:
                    found.append(node)
    return found


def _sign_of_zero(value: Any, zeros: Container[fx.Node]) -> float | None:
    """Returns 1 for 0.0 and -1 for -0.0, as a number or a tensor that is filled with it; ``None`` for anything else."""
    if isinstance(value, fx.Node) and value in zeros:
        filled = value.args[1] if len(value.args) > 1 else 0.0
        return math.copysign(1, filled) if isinstance(filled, (int, float)) else 1
    return math.copysign(1, value) if isinstance(value, (int, float)) and value == 0 else None
