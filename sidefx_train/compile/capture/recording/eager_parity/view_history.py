"""Refuses reads of views whose regenerated history would differ between real and fake tensors.

``as_strided`` views reach the whole storage, but their derivative reaches only the tensor they were made from. Autograd
regenerates the history of a view after its base was written, or after a metadata mutation of the view without
gradients. For a real tensor it becomes an ``as_strided`` view of the base; for a fake tensor, and for views that
strides do not describe (conjugate, negative, other dtype), autograd replays the original view. The replay drops later
metadata mutations of the view.

Metadata mutations of the base after the view was made are kept, with different results: a real view keeps its offset in
the base's storage, a fake one is replayed on the base's new layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.artifacts import NO_GRAD
from sidefx_train.compile.graph.view_chains import (
    STRIDED,
    base_metadata_mutated,
    changes_layout,
    counted_since,
    first_of,
    is_replayed,
    parent_of,
    way_up,
)
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from torch import fx

    from sidefx_train.compile.capture.recording.interfaces import GraphRecorder

aten = torch.ops.aten


def check_strided(tracer: GraphRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks the tensors that an operation reads and writes, before it is recorded.

    Raises:
        Unsupported: autograd would regenerate the history of an operand differently outside the capture.
    """
    if func.namespace == "prim":  # called by C code that must not raise; computes nothing
        return
    given = [
        item for arg in (*args, *kwargs.values()) for item in (arg if safe_isinstance(arg, (list, tuple)) else (arg,))
    ]
    tensors = [item for item in given if safe_isinstance(item, torch.Tensor)]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return
    writes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
    for tensor in tensors:
        if not tensor._is_view() or not tracer.has_node(tensor):
            continue
        up = way_up(tracer.node_of(tensor))
        otherwise = any(map(_reads_otherwise, up))
        mutations = [node for node in up if changes_layout(node) and (otherwise or node.target not in _SQUEEZES)]
        regenerated = writes or any(counted_since(node) or NO_GRAD in node.meta for node in mutations)
        if mutations and regenerated:
            how = "in written storage or with autograd off: autograd drops the mutation"
            _stop(tracer, f"{func} uses, with autograd on, a view whose metadata was mutated, {how}")
        if _base_metadata_mutated(up, tensor, tracer) and (writes or _history_is_regenerated(up, tensor)):
            how = "after the view was made: autograd regenerates its history"
            _stop(tracer, f"{func} uses, with autograd on, a view whose base's metadata was mutated {how}")
        strided = next((node for node in up if node.target in STRIDED), None)
        if strided is None or _is_of_base(strided, tensor, tracer):
            continue
        made = next(node for node in up if is_replayed(node))
        if writes or counted_since(made):
            reason = f"{func} uses, with autograd on, an as_strided view of a view, in written storage"
            raise Unsupported("SFX107", f"{reason}: autograd regenerates its history")


def _stop(tracer: GraphRecorder, reason: str) -> None:
    """Stops the capture of the whole step: after a break, the view would include its metadata mutation.

    Not raised here: an exception while autograd regenerates a history ends the process.
    """
    if tracer.stop is None:
        tracer.stop = Unsupported("SFX107", reason)
        tracer.stop.whole = True


def _base_metadata_mutated(up: list[fx.Node], view: torch.Tensor, tracer: GraphRecorder) -> bool:
    base = view._base
    return (
        base is not None and tracer.has_node(base) and base_metadata_mutated(up, first_of(tracer.node_of(base)), base)
    )


def _history_is_regenerated(up: list[fx.Node], view: torch.Tensor) -> bool:
    """Returns True if reading a view makes autograd regenerate its history."""
    return view.requires_grad and counted_since(next(filter(is_replayed, up)))


_SQUEEZES = frozenset({aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims})
"""Metadata mutations that keep each element's position in a gradient: the engine gives it the size of the view."""


def _reads_otherwise(node: fx.Node) -> bool:
    """Returns True for a view that strides do not describe: conjugate, negative, or of another dtype."""
    made, given = node.meta.get("val"), parent_of(node)
    source = given.meta.get("val") if given is not None else None
    if not safe_isinstance(made, torch.Tensor) or not safe_isinstance(source, torch.Tensor):
        return False
    return (made.dtype, made.is_conj(), made.is_neg()) != (source.dtype, source.is_conj(), source.is_neg())


def _is_of_base(strided: fx.Node, view: torch.Tensor, tracer: GraphRecorder) -> bool:
    base, parent = view._base, parent_of(strided)
    known = base is not None and parent is not None and tracer.has_node(base)
    return known and first_of(parent) is first_of(tracer.node_of(base))  # type: ignore[arg-type]
