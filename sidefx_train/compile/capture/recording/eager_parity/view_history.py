"""Views that ``as_strided`` makes of other views, and such as strides do not describe, once their memory was written.

They reach all memory, and their derivative only what they are made of. Autograd makes the history of a view anew once
its base has been written, or the view was turned in place where no gradients are recorded: outside as a view of the
base, which reaches all of that, of a stand-in as the view was made. What turned the view in place since is forgotten
then, of a stand-in, and of a conjugate or negative view also outside.

What turned the base in place after the view was made is not forgotten, but made of another tensor then: outside a view
has its place in the memory of the base, of a stand-in it is made again of the base as that is now.
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
    """Looks at what an operation reads and writes, before it is recorded.

    Raises:
        Unsupported: autograd outside takes one of its operands to have come to be in another way.
    """
    if func.namespace == "prim":  # asked by code of C that no error may pass, and nothing is computed
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
            how = "in memory that is written or without gradients: autograd forgets the turn"
            _stop(tracer, f"{func} takes, with gradients, a view that was turned in place, {how}")
        if _base_metadata_mutated(up, tensor, tracer) and (writes or _history_is_regenerated(up, tensor)):
            how = "after it was made: autograd makes its history anew"
            _stop(tracer, f"{func} takes, with gradients, a view of what was turned in place {how}")
        strided = next((node for node in up if node.target in STRIDED), None)
        if strided is None or _is_of_base(strided, tensor, tracer):
            continue
        made = next(node for node in up if is_replayed(node))
        if writes or counted_since(made):
            reason = f"{func} takes, with gradients, a view by as_strided of a view, in memory that is written"
            raise Unsupported("SFX107", f"{reason}: autograd makes its history anew")


def _stop(tracer: GraphRecorder, reason: str) -> None:
    """Has the capture end, and not in two parts: behind a break it would be a view with its turn.

    Not raised here: where autograd makes a history anew, an error ends the process.
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
    """True if reading a view has autograd make its history anew."""
    return view.requires_grad and counted_since(next(filter(is_replayed, up)))


_SQUEEZES = frozenset({aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims})
"""Turns after which a gradient has the place of each element still: the engine gives it the size of the view."""


def _reads_otherwise(node: fx.Node) -> bool:
    """True for a view that strides do not describe: a conjugate, a negative, or of another type."""
    made, given = node.meta.get("val"), parent_of(node)
    source = given.meta.get("val") if given is not None else None
    if not safe_isinstance(made, torch.Tensor) or not safe_isinstance(source, torch.Tensor):
        return False
    return (made.dtype, made.is_conj(), made.is_neg()) != (source.dtype, source.is_conj(), source.is_neg())


def _is_of_base(strided: fx.Node, view: torch.Tensor, tracer: GraphRecorder) -> bool:
    base, parent = view._base, parent_of(strided)
    known = base is not None and parent is not None and tracer.has_node(base)
    return known and first_of(parent) is first_of(tracer.node_of(base))  # type: ignore[arg-type]
