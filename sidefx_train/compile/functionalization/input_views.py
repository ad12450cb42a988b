"""Checks what functionalization supports, and describes views of inputs that leave a step."""

from __future__ import annotations

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.artifacts import GraphInput, TracedGraph
from sidefx_train.compile.graph.fx_utils import written_args
from sidefx_train.compile.graph.view_chains import way_up
from sidefx_train.errors import BackendError


def refuse_unsupported(traced: TracedGraph) -> None:
    """Refuses graphs that functionalization would change in meaning.

    Raises:
        BackendError: a storage is replaced or resized.
    """
    graph = traced.module.graph
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, compat.OpOverload):
            name = node.target._schema.name
            kept = name in ("aten::resize_", "aten::resize_as_") and _keeps_size(node)
            if name in ("aten::set_", "aten::resize_", "aten::resize_as_", "aten::set_data") and not kept:
                raise BackendError("SFX201", f"{name} replaces or resizes the storage of a tensor")
            if torch.Tag.inplace_view not in node.target.tags and _resizes(node):
                raise BackendError("SFX201", f"{name} resizes the tensor that it writes to")
            if any(_shows_elements_twice(written) for written in written_args(node)):
                raise BackendError("SFX201", f"{name} writes to a part of an expanded view")
            if any(_leaves_out_elements(written) for written in written_args(node)):
                raise BackendError("SFX201", f"{name} writes to windows that overlap or leave out elements")


def _shows_elements_twice(node: fx.Node) -> bool:
    """Returns True for a view of an expanded view: functionalization would sum a write to it over the copies."""
    expanded = [each for each in way_up(node) if each.target is torch.ops.aten.expand.default]
    return any(isinstance(n, int) and n == 0 for each in expanded for n in each.meta["val"].stride())


def _leaves_out_elements(node: fx.Node) -> bool:
    """Returns True for a view of windows that overlap, or that some elements are in none of: functionalization would
    set these to zero, and sum a write to those."""
    for each in way_up(node):
        if each.target is torch.ops.aten.unfold.default:
            base, dim, size, step = each.args
            length = base.meta["val"].shape[dim]  # type: ignore[union-attr]
            if not all(type(n) is int for n in (length, size, step)) or size != step or length % step:
                return True
    return False


def _resizes(node: fx.Node) -> bool:
    """Returns True for an operation that resizes its ``out=`` and whose storage something may refer to."""
    made = node.meta.get("val")
    after = made if isinstance(made, (list, tuple)) else (made,)
    arguments = [a.name for a in node.target._schema.arguments if a.is_out]  # type: ignore[union-attr]
    given = [node.kwargs.get(name) for name in arguments]
    before = [(_is_known(each), each.meta.get("val")) for each in given if isinstance(each, fx.Node)]
    return any(
        isinstance(old, torch.Tensor)
        and isinstance(new, torch.Tensor)
        and old.shape != new.shape
        and (known or old.numel())
        for (known, old), new in zip(before, after, strict=False)
    )


def _is_known(node: fx.Node) -> bool:
    """Returns True for a tensor in an outside storage, or in that of another tensor."""
    returns = node.target._schema.returns if isinstance(node.target, compat.OpOverload) else ()
    return node.op == "placeholder" or any(each.alias_info is not None for each in returns)


def _keeps_size(node: fx.Node) -> bool:
    """Returns True for a resize to the current size."""
    before, after = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    return before is not None and (before.shape, before.stride()) == (after.shape, after.stride())


def view_bits(out: fx.Node, given: GraphInput) -> tuple[torch.dtype, bool, bool] | None:
    """Returns (dtype, is conjugate, is negative) of a view of an input, or ``None`` if they are the input's.

    Raises:
        BackendError: the view does not begin at an element of the input.
    """
    value, like = out.meta["val"], given.example
    bits, own = ((t.dtype, t.is_conj(), t.is_neg()) for t in (value, like))
    if bits == own and not any(own[1:]):
        return None
    if like.storage_offset() * like.itemsize % value.itemsize:
        raise BackendError("SFX201", f"output {out} is a view of {given.source} that begins inside an element")
    return bits


def view_layout(out: fx.Node, given: GraphInput) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Returns size, stride and offset, relative to the input, to replay a view of it outside the graph.

    Raises:
        BackendError: the size is symbolic.
    """
    value = out.meta["val"]
    # As captured: functionalization loses strides and offset once the input is written.
    size, stride = tuple(value.shape), tuple(value.stride())
    offset = value.storage_offset() - given.example.storage_offset() * given.example.itemsize // value.itemsize
    if not all(isinstance(n, int) for n in (*size, *stride, offset)):
        raise BackendError("SFX201", f"output {out} is a view of {given.source} with symbolic size")
    return tuple(size), tuple(stride), offset
