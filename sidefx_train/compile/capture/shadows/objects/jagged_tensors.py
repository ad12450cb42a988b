"""Creates shadows for outside jagged nested tensors: a jagged tensor over the shadows of values and offsets.

Values and offsets are inputs of the graph; the size of the ragged dimension belongs to the tensor of offsets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows.objects.leaf_hooks import carry_accumulation_hooks, carry_hooks
from sidefx_train.compile.capture.shadows.objects.wrapper_tensors import WrapperRecord
from sidefx_train.compile.capture.shadows.records import InstanceRecord, Record
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI

_PARTS = ("_values", "_offsets", "_lengths", "_ragged_idx", "_metadata_cache")
_CACHED = ("min_seqlen", "max_seqlen")


class JaggedRecord(Record):
    """A jagged tensor whose gradient leaves the step: it has an autograd history, or a backward outside reaches it.

    Its shadow has the history of its values, which are an input of the graph.

    Attributes:
        history: the node of the shadow.
        version: version of the shadow.
    """

    instance: InstanceRecord

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source) -> None:
        super().__init__(heap, real, shadow, source)
        self.instance = InstanceRecord(heap, real, shadow, source, source)
        self.history, self.version = shadow.grad_fn, shadow._version

    def check(self) -> None:
        """Refuses what changed the tensor itself."""
        if self.shadow.grad_fn is not self.history or self.shadow._version != self.version:
            self.heap.refuse("SFX107", f"changes {self.source.label}, a nested tensor with an autograd history")


def jagged_shadow(heap: ShadowTableAPI, real: Any, source: Source, static: bool) -> Any:
    """Returns the shadow of a jagged tensor.

    Args:
        heap: the shadow table.
        real: the tensor.
        source: path to it.
        static: the entry holds it.

    Raises:
        Unsupported: it cannot be captured.
    """
    if real.is_inference():
        heap.refuse("SFX109", f"{source.label} is a nested tensor created in inference mode")
    if not real.is_leaf and real.retains_grad:
        heap.refuse("SFX109", f"{source.label} is a nested tensor that retains its gradient")
    passes = not real.is_leaf or (real.requires_grad and _passes(heap, real))
    static = static and not passes
    place = heap.sources.const(real, source.label) if static else source
    if static:
        heap.guard("is", source, real)
        heap.static_roots.add(id(place))
    heap.guard("type", place, type(real))
    for name in ("requires_grad", "is_leaf"):
        heap.guard("is", heap.sources.slot(place, name), getattr(real, name))
    layout = _layout(heap, real, place, source)
    shadow = _with_history(heap, real, place, layout) if passes else _leaf(real, layout)
    record: Any = (
        JaggedRecord(heap, real, shadow, place)
        if passes
        else WrapperRecord(heap, real, shadow, place, "static" if static else "tensor")
    )
    compat.forget_layout(shadow)
    record.instance.snapshot = dict(vars(shadow))
    heap.register(record)
    if real.requires_grad and not passes:
        carry_hooks(heap, real, shadow, record)
        carry_accumulation_hooks(heap, real, shadow, record)
    return shadow


def _passes(heap: ShadowTableAPI, real: Any) -> bool:
    """Returns True for a leaf whose gradient leaves the step, or that is none: a view made with autograd off."""
    with compat.real_world():
        return heap.specialization.passes_ragged_gradients or compat.accumulator_of(real) is None


def _layout(heap: ShadowTableAPI, real: Any, place: Source, source: Source) -> dict[str, Any]:
    """Returns the shadows of what a jagged tensor consists of."""
    cache = heap.sources.attr(place, "_metadata_cache")
    if not heap.below(source, heap.static_roots):
        for values in (heap.sources.attr(place, "_values"), heap.sources.values(place)):
            heap.ragged_dims[id(values)] = real._ragged_idx - 1
        heap.ragged_dims.update({id(heap.sources.item(cache, name)): 0 for name in _CACHED})
    layout = {name: heap.shadow(vars(real)[name], heap.sources.attr(place, name), name) for name in _PARTS}
    for name, value in layout.items():
        if safe_isinstance(value, torch.Tensor) and type(value) is not compat.FakeTensor:
            heap.refuse("SFX109", f"{source.label}.{name}, of a nested tensor, is a {type(value).__qualname__}")
    heap.ragged_size(layout["_offsets"] if layout["_lengths"] is None else layout["_lengths"])
    return layout


def _leaf(real: Any, layout: dict[str, Any]) -> Any:
    values, offsets, lengths, ragged, cache = layout.values()
    with compat.no_recording():
        shadow = compat.make_jagged(values, offsets, lengths, ragged, cache, real.requires_grad)
    compat.copy_gradient_dtype(real, shadow)
    return shadow


def _with_history(heap: ShadowTableAPI, real: Any, place: Source, layout: dict[str, Any]) -> Any:
    with compat.real_world():
        values = compat.inner_values(real)
    name = "AccumulateGrad" if real.is_leaf else type(real.grad_fn).__name__
    entering = heap.shadow(values, heap.sources.values(place))
    return compat.jagged_with_history(name, entering, *list(layout.values())[1:])
