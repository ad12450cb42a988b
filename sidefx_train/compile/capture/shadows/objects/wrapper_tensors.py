"""Creates shadows for outside wrapper subclasses: their class has a ``__torch_dispatch__``, and they hold tensors.

The shadow is an instance of the same class over the shadows of what the real one holds. Its inner tensors are inputs of
the graph. Operators of the shadow have the class's ``__torch_dispatch__`` interpreted, and what that does to inner
tensors is recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import TensorFacts
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows.objects.leaf_hooks import carry_accumulation_hooks, carry_hooks
from sidefx_train.compile.capture.shadows.records import InstanceRecord, LeafRecord

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


class WrapperRecord(LeafRecord):
    """A wrapper subclass; its attributes, inner tensors among them, are in :attr:`instance`.

    Attributes:
        kind: ``"static"`` if the entry holds it.
        facts: metadata at entry.
        accumulator_hooked: its ``AccumulateGrad`` node has hooks.
    """

    instance: InstanceRecord
    accumulator_hooked = False

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source, kind: str) -> None:
        super().__init__(heap, real, shadow, source)
        self.kind = kind
        self.instance = InstanceRecord(heap, real, shadow, source, source)
        self.facts = TensorFacts.of(shadow)


def wrapper_shadow(heap: ShadowTableAPI, real: Any, source: Source, static: bool) -> Any:
    """Returns the shadow of a wrapper subclass.

    Args:
        heap: the shadow table.
        real: the tensor.
        source: path to it.
        static: the entry holds it.

    Raises:
        Unsupported: it cannot be captured.
    """
    _check(heap, real, source)
    place = heap.sources.const(real, source.label) if static else source
    if static:
        heap.guard("is", source, real)
        heap.static_roots.add(id(place))
    heap.fixed_roots.add(id(place))
    facts = TensorFacts.of(real)
    heap.guard("tensor", place, facts)
    heap.guard("is", heap.sources.slot(place, "grad_fn"), None)
    heap.guard("equal", heap.sources.call(heap.sources.slot(place, "_is_view")), real._is_view())
    heap.guard("equal", heap.sources.call(heap.sources.slot(place, "storage_offset")), real.storage_offset())
    with compat.no_recording():
        layout = (real.shape, real.stride(), real.storage_offset(), real.dtype, real.device)
        shadow = compat.make_wrapper(type(real), *layout, requires_grad=real.requires_grad)
    compat.copy_gradient_dtype(real, shadow)
    record = WrapperRecord(heap, real, shadow, place, "static" if static else "tensor")
    heap.register(record)
    record.instance.fill()
    if real.requires_grad:
        carry_hooks(heap, real, shadow, record)
        carry_accumulation_hooks(heap, real, shadow, record)
    return shadow


def _check(heap: ShadowTableAPI, real: Any, source: Source) -> None:
    if not compat.has_plain_functions(type(real)):
        heap.shown.begin(f"{source.label} is a {type(real).__qualname__}")
    if compat.answers_in_python(real) or real.layout is not torch.strided:
        _refuse(heap, real, source, "that computes its sizes, device or layout itself")
    if not real.is_leaf:
        _refuse(heap, real, source, "with an autograd history")
    if real._is_view() and (real.requires_grad or real._base.requires_grad):
        _refuse(heap, real, source, "that is a view of a tensor that requires gradients")
    if real.is_inference():
        _refuse(heap, real, source, "created in inference mode")


def _refuse(heap: ShadowTableAPI, real: Any, source: Source, which: str) -> None:
    heap.refuse("SFX109", f"{source.label} is a {type(real).__qualname__}, a tensor subclass {which}")
