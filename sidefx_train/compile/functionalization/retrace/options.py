"""Options of a retrace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from sidefx_train.compile.functionalization.error_hazards import IndexUse
from sidefx_train.compile.graph.artifacts import SyntheticBase


@dataclass(frozen=True)
class RetraceOptions:
    """Options of a retrace.

    Attributes:
        decompositions: operator -> decomposition, applied while recording.
        tensor_scalars: numbers become slots of one float64 scalar buffer; otherwise symbolic placeholders.
        skip: nodes that are not run (the tail).
        defer: placeholders whose new value is returned instead of copied.
        channels_last: run convolutions on channels-last images.
        same: representative of the argument that a node returns.
        guarded: indices to clamp and report on, by the node that uses them.
        bases: storages in which inputs overlap.
        roots: nodes that created a value's storage.
        written: nodes whose storage is written.
        instead: replacements of nodes' operations.
        wide: arithmetic on integers whose results may need more than 64 bits, which the graph reports.
    """

    decompositions: Any
    tensor_scalars: bool
    skip: frozenset[fx.Node]
    defer: frozenset[fx.Node]
    channels_last: bool = False
    same: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    guarded: Mapping[fx.Node, tuple[IndexUse, ...]] = field(default_factory=dict)
    bases: tuple[SyntheticBase, ...] = ()
    roots: Mapping[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    written: Set[fx.Node] = frozenset()
    instead: Mapping[fx.Node, Callable[..., Any]] = field(default_factory=dict)
    wide: Set[fx.Node] = frozenset()
