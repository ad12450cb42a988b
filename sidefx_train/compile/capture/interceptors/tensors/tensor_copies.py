"""Copies of tensors by Python's protocols: ``copy.deepcopy``, and ``__reduce_ex__`` for ``copy.copy`` and ``pickle``.

torch's own methods, called on a fake tensor, copy its attributes: the fake mode with its weak references to storages,
which count as one reference and are released twice. The only symptom is a crash of the process.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.frame import in_copy
from sidefx_train.compile.capture.shadows.objects.tensors import PLAIN_TENSORS
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.graph.strided_layout import is_dense

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(copy.deepcopy)
def _with_memo(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records the caller's memo: torch stores entries by storage address in it, a capture does not."""
    memo = args[1] if len(args) > 1 else kwargs.get("memo")
    if memo is not None and not in_copy(world.interp.current_frame):
        world.given_memos.append(memo)
    return ABSENT


@registry.intercept(torch.Tensor.__deepcopy__)
def _deep_copy(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs or type(args[0]) is not compat.FakeTensor:
        return ABSENT
    tensor, memo = args
    if not tensor.is_leaf:  # torch raises before any other check
        return ABSENT
    why = _not_copied(world, tensor, memo)
    if why:
        world.heap.refuse("SFX104", f"makes a deep copy of a tensor {why}")
    world.deep_copies.append((memo, tensor))
    return world.interp.call(_copied, (tensor, memo, tensor.requires_grad), {})


@registry.intercept(torch.Tensor.__reduce_ex__)
def _reduce(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args or type(args[0]) is not compat.FakeTensor:
        return ABSENT
    world.heap.refuse("SFX104", "pickles a tensor, or copies it by copy.copy")


def _not_copied(world: TraceWorld, tensor: torch.Tensor, memo: Any) -> str:
    """Returns why torch's copy, which copies the whole storage, would differ from ours; "" if it would not."""
    if world.interp.type_of(tensor) not in PLAIN_TENSORS:
        return f"of the subclass {world.interp.type_of(tensor).__qualname__}"
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        return f"with layout {tensor.layout} on {tensor.device}"
    if tensor.is_conj() or tensor.is_neg():
        return "that is a lazy conjugate or negative"
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    if not (whole and tensor.storage_offset() == 0 and is_dense(tensor)):
        return "that does not fill its storage"
    if not in_copy(world.interp.current_frame) or any(memo is given for given in world.given_memos):
        return "with a memo that copy.deepcopy did not make"
    if world.heap.record_of(memo) is not None:
        return "with a memo from outside the step"
    others = {compat.storage_id(t) for m, t in world.deep_copies if m is memo and t is not tensor}
    if others and not _lies_alone(world, compat.storage_id(tensor), others):
        return "together with another one that shares its storage"
    if world.interp.getattr(tensor, "grad") is not None:
        return "that has a gradient"
    record = world.heap.record_of(tensor)
    if isinstance(record, TensorRecord):
        own = record.own_attributes()
        own.fill()
        return "with user attributes" if own.space or own.written else ""
    return "with user attributes" if id(tensor) in world.tagged else ""


def _lies_alone(world: TraceWorld, memory: int, others: set[int]) -> bool:
    """Returns True if a storage differs from the others, which is guarded: copies from one storage share one, too."""
    if memory in others:
        return False
    given = {
        compat.storage_id(record.memory): record.real
        for record in world.heap.by_real.values()
        if isinstance(record, TensorRecord) and record.memory.layout is torch.strided
    }
    if memory in given and not others.isdisjoint(given):
        world.kept_apart.update(id(given[each]) for each in (memory, *others) if each in given)
    return True


def _copied(tensor: torch.Tensor, memo: dict[Any, Any], requires_grad: bool) -> torch.Tensor:
    """Copies a tensor in place of torch's method; the copy has version 1, as there."""
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    with torch.no_grad():
        made = torch.empty_like(tensor).copy_(tensor)
    if requires_grad:
        made.requires_grad_()
    memo[id(tensor)] = made
    return made
