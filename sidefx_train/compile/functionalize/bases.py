"""Inputs that overlap in memory while one of them is written: views of a synthetic base, which stands for the memory.

Functionalization sees one tensor, the base, and the inputs as views of it, so that what is written through one is read
through the others. Outside, the base is made from the input that starts first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from sidefx_train.compile.artifacts import GraphInput, SyntheticBase, TracedGraph
from sidefx_train.compile.functionalize.aliases import Aliases, extent
from sidefx_train.errors import BackendError


@dataclass(frozen=True)
class Member:
    """An input that is a view of a base.

    Attributes:
        base: which one.
        start: distance from its start, in bytes.
        example: the input at entry.
    """

    base: int
    start: int
    example: torch.Tensor


def find_bases(traced: TracedGraph, aliases: Aliases, written: set[fx.Node]) -> tuple[SyntheticBase, ...]:
    """The bases that a graph needs.

    Raises:
        BackendError: inputs overlap in a way that has no base.
    """
    placeholders = [n for n in traced.module.graph.nodes if n.op == "placeholder"]
    turned = {aliases.same[n] for n in traced.module.graph.nodes if _turns(n)}
    found: list[SyntheticBase] = []
    for group in aliases.overlapping:
        if not any(aliases.roots[node] & written for node in group):
            continue
        positions = [placeholders.index(node) for node in group]
        given = [traced.inputs[i] for i in positions]
        if any(node in turned for node in group) or not all(_plain(each) for each in given):
            names = ", ".join(each.source for each in given)
            raise BackendError("SFX201", f"inputs that share memory while one is written: {names}")
        found.append(_base(positions, given))
    return tuple(found)


def _turns(node: fx.Node) -> bool:
    return torch.Tag.inplace_view in getattr(node.target, "tags", ())


def _plain(given: GraphInput) -> bool:
    value = given.example
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return all(isinstance(n, int) for n in sizes) and not value.is_conj() and not value.is_neg()


def _base(positions: list[int], given: list[GraphInput]) -> SyntheticBase:
    examples = [each.example for each in given]
    first = min(extent(value)[0] for value in examples)
    starts = tuple(extent(value)[0] - first for value in examples)
    size = max(extent(value)[1] for value in examples) - first
    dtypes = {value.dtype for value in examples}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    if any(start % value.itemsize for start, value in zip(starts, examples, strict=True)):
        raise BackendError("SFX201", f"inputs overlap by parts of an element: {', '.join(g.source for g in given)}")
    return SyntheticBase(tuple(positions), starts, size // dtype.itemsize, dtype)


def members(bases: tuple[SyntheticBase, ...], inputs: tuple[GraphInput, ...]) -> dict[int, Member]:
    """The members of bases, by input position."""
    return {
        position: Member(i, start, inputs[position].example)
        for i, base in enumerate(bases)
        for position, start in zip(base.members, base.starts, strict=True)
    }


def view_of(base: torch.Tensor, member: Member) -> torch.Tensor:
    """The input as a view of its base, by slices where it is contiguous."""
    like = member.example
    start = member.start // base.itemsize
    if base.dtype != like.dtype:
        low, high = extent(like)
        base = base.narrow(0, start, (high - low) // base.itemsize).view(like.dtype)
        start = 0
    if like.is_contiguous():
        return base.narrow(0, start, like.numel()).view(like.shape)
    return base.as_strided(like.shape, like.stride(), base.storage_offset() + start)


def real_base(base: SyntheticBase, anchor: torch.Tensor) -> torch.Tensor:
    """The memory of a base, from the input that starts first."""
    if anchor.dtype == base.dtype:
        return anchor.detach().as_strided((base.size,), (1,), anchor.storage_offset())
    offset = anchor.storage_offset() * anchor.itemsize // base.dtype.itemsize
    made = torch.empty(0, dtype=base.dtype, device=anchor.device)
    return made.set_(anchor.untyped_storage(), offset, (base.size,), (1,))
