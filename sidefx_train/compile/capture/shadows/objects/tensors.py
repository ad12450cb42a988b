"""Creates fake tensors for outside tensors, with their guards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import TensorFacts
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows.objects.dtensors import dtensor_shadow
from sidefx_train.compile.capture.shadows.objects.jagged_tensors import jagged_shadow
from sidefx_train.compile.capture.shadows.objects.leaf_hooks import carry_accumulation_hooks, carry_hooks
from sidefx_train.compile.capture.shadows.objects.sparse_matrices import sparse_matrix
from sidefx_train.compile.capture.shadows.objects.sparse_tensors import sparse_shadow
from sidefx_train.compile.capture.shadows.objects.wrapper_tensors import wrapper_shadow
from sidefx_train.compile.capture.shadows.records import UNREAD, TensorRecord
from sidefx_train.compile.common.distributed_models import refuse_if_distributed, refuse_whole
from sidefx_train.compile.common.sentinels import ABSENT, DYNAMIC_DIMS
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.artifacts import InputKind
from sidefx_train.errors import LAZY

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def tensor_shadow(heap: ShadowTableAPI, real: torch.Tensor, source: Source) -> Any:
    """Returns the shadow of a tensor: a fake tensor, which is an input of the graph."""
    if compat.is_dtensor(real):
        return dtensor_shadow(heap, real, source)
    if compat.is_jagged(real):
        return jagged_shadow(heap, real, source, _is_held(heap, real, source))
    if compat.is_wrapper(real):
        return wrapper_shadow(heap, real, source, _is_held(heap, real, source))
    if type(real) not in PLAIN_TENSORS:
        refuse_if_distributed(real, source.label, heap.locate())
        if safe_isinstance(real, torch.nn.parameter.UninitializedTensorMixin):
            refuse_whole(LAZY, f"{source.label} gets its shape from the first batch", heap.locate())
        what = f"{source.label} is a {type(real).__qualname__}"
        heap.shown.admit(type(real), what)
        if real.requires_grad and compat.converts_functions(type(real)):  # optimizer state would be of that class
            heap.refuse("SFX109", f"{what}, a tensor subclass that requires gradients")
    if real._is_zerotensor():
        heap.refuse("SFX109", f"{source.label} is a tensor of zeros without storage")
    if real.is_quantized:
        heap.refuse("SFX109", f"{source.label} is quantized ({real.dtype})")
    if real.is_nested:
        heap.refuse("SFX109", f"{source.label} is a nested tensor of strided layout")
    if real.layout is not torch.strided:
        for make_shadow in (sparse_matrix, sparse_shadow):
            made = make_shadow(heap, real, source)
            if made is not ABSENT:
                return made
        heap.refuse("SFX109", f"{source.label} has layout {real.layout}")
    try:
        with compat.real_world():  # autograd may regenerate its node
            real.grad_fn  # noqa: B018
    except RuntimeError as error:  # autograd forbids reading some multi-output views
        heap.refuse("SFX109", f"{source.label} has no fake tensor: {error}")
    if real._base is not None and real._base.layout is not torch.strided:
        heap.refuse("SFX109", f"{source.label} is a view of a tensor of layout {real._base.layout}")
    if compat.is_jagged(real._base):
        heap.refuse("SFX109", f"{source.label} is a view of a nested tensor")
    if real._base is not None and compat.storage_address(real._base) != compat.storage_address(real):
        heap.refuse("SFX109", f"{source.label} is a view whose storage was replaced (.data)")
    if real._base is not None and real.is_leaf and real.requires_grad and not _accumulates(real):
        reason = "a view of a leaf, made in no_grad mode, which gets no gradient although it requires one"
        heap.refuse("SFX109", f"{source.label} is {reason}")
    address = compat.storage_address(real)
    for other in heap.memory.replaced():
        if other.real is real._base or (compat.storage_address(other.real) == address and other.resized):
            reason = f"{source.label} shares storage with {other.source.label}, whose storage was replaced"
            heap.refuse("SFX109", reason)
    resized = not safe_isinstance(real, torch.nn.Parameter) and any(
        label == source.label for label, _ in heap.specialization.dynamic_sizes
    )
    static = real.grad_fn is None and not resized and _is_held(heap, real, source)
    place = heap.sources.const(real, source.label) if static else source
    if static and heap.below(source, heap.host_roots):
        heap.host_roots.add(id(place))
    if static:
        heap.guard("is", source, real)
    dynamic = frozenset() if static else _dynamic(heap, real, source)
    if real.requires_grad and not static and real.is_leaf:
        heap.guard("is", heap.sources.slot(place, "grad_fn"), None)
    kind: InputKind = "static" if static else "tensor"
    base_fake = _base_fake(heap, real if real._base is None else real._base) if not dynamic else None
    try:
        fake = heap.tracer.add_tensor(real, kind, source.label, dynamic, base_fake)
    except (RuntimeError, AssertionError) as error:  # a view of another dtype than its base, or of a leaf that
        # began to require gradients after its first fake was made: torch cannot create a fake of it
        heap.refuse("SFX109", f"{source.label} has no fake tensor: {error}")
    heap.guard("tensor", place, _facts(heap, real, fake, place))
    record = TensorRecord(heap, real, fake, place, kind)
    heap.register(record)
    heap.in_memory.setdefault(compat.storage_address(real), []).append(record)
    if record.edge is not None:
        heap.outside_nodes[id(record.edge.node)] = record
    if not real.is_leaf:
        heap.guard("is", heap.sources.slot(place, "is_leaf"), False)
        heap.guard("equal", heap.sources.slot(place, "retains_grad"), real.retains_grad)
        if real.retains_grad:
            fake.retain_grad()
    if real.is_leaf or real.retains_grad:
        record.grad = UNREAD
    if real.is_leaf and real.requires_grad:
        carry_hooks(heap, real, fake, record)
        carry_accumulation_hooks(heap, real, fake, record)
    if source.label in heap.specialization.views_needing_base and real._base is not None:
        heap.shadow(real._base, heap.sources.slot(place, "_base"))
    return fake


def _accumulates(real: torch.Tensor) -> bool:
    with compat.real_world():
        return compat.accumulates(real)


def _is_held(heap: ShadowTableAPI, real: torch.Tensor, source: Source) -> bool:
    """Returns True for a parameter, buffer or optimizer state: the entry holds it and guards its identity."""
    if source.label in heap.specialization.refetched or source.from_arguments or _is_made(source):
        return False
    if safe_isinstance(real, torch.nn.Parameter):
        return True
    return not _is_of_gradient(source, heap.static_roots) and heap.below(source, heap.static_roots)


def _is_made(source: Source | None) -> bool:
    """Returns True for what a method makes at every call, as those of a sparse matrix do."""
    while source is not None and not (
        source.kind == "call" and source.parent is not None and source.parent.kind == "slot"
    ):
        source = source.parent
    return source is not None


def _is_of_gradient(source: Source, roots: set[int]) -> bool:
    """Returns True for a gradient, or a tensor inside one: another one at every step, also where its leaf is held."""
    step: Source | None = source
    while step is not None and id(step) not in roots:
        if step.kind == "grad":
            return True
        step = step.parent
    return False


def _base_fake(heap: ShadowTableAPI, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns (detached tensor, fake of a tensor that shares its version counter), or ``None``."""
    if id(real) in heap.by_real or type(real) is not torch.Tensor or not real.is_leaf or real._is_view():
        return None
    for other in heap.in_memory.get(compat.storage_address(real), ()):
        if other.real._base is real:  # its fake was created with that of its view
            return None
        plain = not any(t.is_conj() or t.is_neg() for t in (other.real, real))
        fixed = all(safe_isinstance(size, int) for size in other.shadow.shape)
        if plain and fixed and compat.share_version_counter(other.real, real):
            return real, other.memory
    return None


def _dynamic(heap: ShadowTableAPI, real: torch.Tensor, source: Source) -> frozenset[int]:
    """Returns the dimensions with symbolic size; sizes 0 and 1 are never symbolic."""
    if heap.below(source, heap.fixed_roots):
        return frozenset()
    dims = {dim for label, dim in heap.specialization.dynamic_sizes if label == source.label} | marked_dims(real)
    if id(source) in heap.ragged_dims:
        dims.add(heap.ragged_dims[id(source)])
    if heap.specialization.all_dynamic and source.from_arguments:
        dims |= set(range(real.dim()))
    return frozenset(dim for dim in dims if dim < real.dim() and real.shape[dim] > 1)


def _facts(heap: ShadowTableAPI, real: torch.Tensor, fake: torch.Tensor, source: Source) -> TensorFacts:
    """Returns the guarded metadata of a tensor; conditions guard symbolic sizes and strides."""
    facts = TensorFacts.of(real)
    shape, stride = list(facts.shape), list(facts.stride)
    for kind, values, symbols in (("shape", shape, fake.shape), ("stride", stride, fake.stride())):
        for dim, symbol in enumerate(symbols):
            if safe_isinstance(symbol, torch.SymInt):
                whole = heap.sources.slot(source, kind)
                if kind == "stride":
                    whole = heap.sources.call(whole)
                heap.sizes.append((symbol, heap.sources.item(whole, dim)))
                values[dim] = None
    return replace(facts, shape=tuple(shape), stride=tuple(stride))


def marked_dims(tensor: torch.Tensor) -> set[int]:
    """Returns the dimensions passed to :func:`sidefx_train.mark_dynamic`."""
    return set(vars(tensor).get(DYNAMIC_DIMS, ()))
