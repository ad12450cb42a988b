"""Torch's elimination of common subexpressions, without what it takes for common and is not.

Two draws with equal arguments are two, collectives are counted by all ranks, and 0.0 is not -0.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from sidefx_train.torch_compat.inductor.collective_order import distinct_collectives, restore_groups
from sidefx_train.torch_compat.inductor.patching import replaced
from sidefx_train.torch_compat.op_overloads import is_random
from sidefx_train.torch_compat.recording import late_module


class _NegativeZero(float):
    """-0.0 as an argument that differs from 0.0: torch compares arguments by type and value."""


class _ExactComplex(complex):
    """A complex argument with a zero part, which differs from the one with the other zero."""

    def __eq__(self, other: object) -> bool:
        return type(other) is _ExactComplex and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def without_common_subexpressions(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a functional graph in which equal operations on equal arguments are one."""
    from torch._functorch.compile_utils import fx_graph_cse

    with distinct_collectives(module.graph), _distinct_draws(module.graph), _distinct_zeros(module.graph):
        merged = late_module(module, fx_graph_cse(module.graph))
    restore_groups(merged.graph)
    _restore_zeros(merged.graph)
    return merged


@contextmanager
def _distinct_draws(graph: fx.Graph) -> Iterator[None]:
    """Context in which torch's CSE merges no two random draws of a graph.

    Upstream: it leaves those of a list apart, in which operators are missing that ``torch.normal`` and
    ``torch._sample_dirichlet`` become: two calls with equal arguments returned the same numbers. Seen in torch 2.11 to
    2.15.
    """
    from torch._functorch import compile_utils

    drawing = {node.target.overloadpacket for node in graph.nodes if is_random(node.target)}
    with replaced(compile_utils, "rand_ops", lambda listed: [*listed, *drawing]):
        yield


@contextmanager
def _distinct_zeros(graph: fx.Graph) -> Iterator[None]:
    """Context in which torch's CSE tells ``-0.0`` from ``0.0``.

    Upstream: ``torch.full((2,), 0.0)`` and ``torch.full((2,), -0.0)`` are one, so ``1 / x`` of the second is positive.
    Seen in torch 2.13.
    """
    _map_numbers(graph, _marked, _has_signed_zero)
    try:
        yield
    finally:
        _restore_zeros(graph)


def _restore_zeros(graph: fx.Graph) -> None:
    _map_numbers(graph, _plain, lambda value: type(value) in _PLAIN)


_PLAIN: dict[type, type] = {_NegativeZero: float, _ExactComplex: complex}


def _plain(value: Any) -> Any:
    return _PLAIN[type(value)](value) if type(value) in _PLAIN else value


def _marked(value: Any) -> Any:
    if not _has_signed_zero(value):
        return value
    return _NegativeZero(value) if type(value) is float else _ExactComplex(value)


def _has_signed_zero(value: Any) -> bool:
    """Returns True for -0.0, and for a complex number with a zero of either sign."""
    if type(value) is complex:
        return 0 in (value.real, value.imag)
    return type(value) is float and value == 0 and math.copysign(1, value) < 0


def _map_numbers(graph: fx.Graph, change: Any, concerns: Any) -> None:
    """Changes numbers among the arguments of nodes, also those in lists, where ``concerns`` holds for one."""
    for node in graph.nodes:
        given: list[Any] = []
        map_aggregate((node.args, node.kwargs), given.append)
        if any(map(concerns, given)):
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), change)
