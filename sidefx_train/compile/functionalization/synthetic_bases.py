"""Synthetic bases: inputs that overlap in memory, one of them written, become views of one tensor over that memory.

Functionalization sees only the base, with the inputs as views of it, so that a write through one is visible through the
others. At run time, the base is made from the first of them.

``as_strided`` reaches past the tensor it is called on: a written input with such a view has a base too. An input whose
metadata is mutated (``t_``, ``as_strided_``) is another view of its base from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from sidefx_train.compile.graph.alias_analysis import Aliases
from sidefx_train.compile.graph.artifacts import GraphInput, SyntheticBase, TracedGraph
from sidefx_train.compile.graph.strided_layout import extent
from sidefx_train.compile.graph.view_chains import STRIDED
from sidefx_train.errors import BackendError


@dataclass(frozen=True)
class Member:
    """An input that is a view of a base.

    Attributes:
        base: index of the base.
        start: offset from its start, in bytes.
        example: the input at entry.
    """

    base: int
    start: int
    example: torch.Tensor


def find_bases(traced: TracedGraph, aliases: Aliases, written: set[fx.Node]) -> tuple[SyntheticBase, ...]:
    """Returns the bases that a graph needs.

    Raises:
        BackendError: inputs overlap in a way that has no base.
    """
    graph = traced.module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    strided = [n for n in graph.nodes if n.target in STRIDED]
    reached = {root for n in strided for root in aliases.roots[n] if root in placeholders}
    grouped = {node for group in aliases.overlapping for node in group}
    groups = aliases.overlapping + [[node] for node in placeholders if node in reached - grouped]
    found: list[SyntheticBase] = []
    for group in groups:
        if not any(aliases.roots[node] & written for node in group):
            continue
        positions = [placeholders.index(node) for node in group]
        given = [traced.inputs[i] for i in positions]
        if not all(_plain(each) for each in given):
            names = ", ".join(each.source for each in given)
            raise BackendError("SFX201", f"inputs that share memory while one is written: {names}")
        roots = {root for node in group for root in aliases.roots[node]}
        found.append(_base(positions, given, [n.meta["val"] for n in strided if aliases.roots[n] & roots]))
    return tuple(found)


def _plain(given: GraphInput) -> bool:
    value = given.example
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return all(isinstance(n, int) for n in sizes) and not value.is_conj() and not value.is_neg()


def _base(positions: list[int], given: list[GraphInput], views: list[torch.Tensor]) -> SyntheticBase:
    examples = [each.example for each in given]
    first = min(extent(value)[0] for value in (*examples, *views))
    starts = tuple(extent(value)[0] - first for value in examples)
    size = max(extent(value)[1] for value in (*examples, *views)) - first
    dtypes = {value.dtype for value in (*examples, *views)}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    if any(start % value.itemsize for start, value in zip(starts, examples, strict=True)):
        raise BackendError("SFX201", f"inputs overlap by parts of an element: {', '.join(g.source for g in given)}")
    return SyntheticBase(tuple(positions), starts, size // dtype.itemsize, dtype)


def members(bases: tuple[SyntheticBase, ...], inputs: tuple[GraphInput, ...]) -> dict[int, Member]:
    """Returns the members of bases, by input position."""
    return {
        position: Member(i, start, inputs[position].example)
        for i, base in enumerate(bases)
        for position, start in zip(base.members, base.starts, strict=True)
    }


def place_in(base: SyntheticBase, view: torch.Tensor, inputs: tuple[GraphInput, ...], number: int) -> Member:
    """Returns a view that reaches past its input as a member of the base."""
    first = extent(inputs[base.members[0]].example)[0] - base.starts[0]
    return Member(number, extent(view)[0] - first, view)


def view_of(base: torch.Tensor, member: Member) -> torch.Tensor:
    """Returns the input as a view of its base, by slices if it is contiguous."""
    like = member.example
    start = member.start // base.itemsize
    if base.dtype != like.dtype:
        low, high = extent(like)
        base = base.narrow(0, start, (high - low) // base.itemsize).view(like.dtype)
        start = 0
    if like.stride() == torch.empty(like.shape, device="meta").stride():  # for size 1 the stride is arbitrary
        return base.narrow(0, start, like.numel()).view(like.shape)
    if like.dim() == 1 and like.stride(0) > 0:
        low, high = extent(like)
        return base.narrow(0, start, (high - low) // like.itemsize)[:: like.stride(0)]
    return base.as_strided(like.shape, like.stride(), base.storage_offset() + start)


def real_base(base: SyntheticBase, anchor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor of a base, made from the first of its inputs."""
    start = anchor.storage_offset() * anchor.itemsize - base.starts[0]
    memory = anchor.untyped_storage()[start : start + base.size * base.dtype.itemsize]
    # It starts where the base does: ``as_strided`` counts from there.
    return torch.empty(0, dtype=base.dtype, device=anchor.device).set_(memory, 0, (base.size,), (1,))
