"""Creates shadows for outside ``DTensor`` objects: a ``DTensor`` over the fake of the local tensor.

The local tensor is the input of the graph. Operators of the shadow run torch's own dispatch of ``DTensor``, which calls
operators of local tensors and collectives; these are recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows.records import LeafRecord
from sidefx_train.compile.common.distributed_models import refuse_dtensor

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def dtensor_shadow(heap: ShadowTableAPI, real: Any, source: Source) -> Any:
    """Returns the shadow of a ``DTensor``: a parameter of an FSDP module, its gradient, or its optimizer state.

    Raises:
        Unsupported: it is none of these.
    """
    local, spec = compat.local_of(real), compat.spec_of(real)
    if not real.is_leaf or type(local) is not torch.Tensor:
        refuse_dtensor("with an autograd history, or over another class of tensors", source.label, heap.locate())
    if local.device.type != "cpu":
        refuse_dtensor("that is not on the CPU", source.label, heap.locate())
    if any(getattr(real, name) for name in _HOOKS):
        refuse_dtensor("with a hook", source.label, heap.locate())
    parameter = isinstance(real, torch.nn.Parameter)
    held = parameter or heap.below(source, heap.static_roots)
    place = heap.sources.const(real, source.label) if held else source
    if held:
        heap.guard("is", source, real)
        heap.static_roots.add(id(place))
    heap.guard("type", place, type(real))
    dispatcher, rules, implicit = compat.dtensor_dispatcher()
    if not heap.dtensor_rules:
        heap.dtensor_rules = tuple(rules)
    heap.guard("keys", heap.sources.const(rules, "the rules of DTensor for operators"), heap.dtensor_rules)
    settings = heap.sources.const(dispatcher, "the dispatcher of DTensor")
    heap.guard("is", heap.sources.slot(settings, implicit), getattr(dispatcher, implicit))
    heap.guard("is", heap.sources.slot(place, "_spec"), spec)
    heap.guard("equal", heap.sources.slot(place, "requires_grad"), real.requires_grad)
    for name in _HOOKS:
        heap.guard("is", heap.sources.slot(place, name), getattr(real, name))
    fake = heap.shadow(local, heap.sources.slot(place, "_local_tensor"))
    with compat.no_recording():
        shadow = compat.make_dtensor(fake, spec, real.requires_grad)
    compat.copy_gradient_dtype(real, shadow)
    if parameter:
        shadow._is_param = True
    return heap.register(LeafRecord(heap, real, shadow, place))
