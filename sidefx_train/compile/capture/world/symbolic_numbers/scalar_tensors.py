"""Scalar tensors: the prologue reads one-element outside CPU tensors, so that a step may branch on their values.

Optimizers count their steps in such tensors, and some branch on the count (``RAdam``, ``ASGD``). The number at entry is
an input of the graph; the step's additions are tracked, as are comparisons and arithmetic of integers
(``AveragedModel`` tests ``n_averaged == 0``).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.constant_folding import constant_of
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.artifacts import EXACT_IN_FLOAT32, counts_steps
from sidefx_train.compile.graph.fx_utils import written_args

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


aten = torch.ops.aten
_BOUNDS = {torch.int32: 2**31 - 1, torch.int64: 2**62}
"""Bounds of integers that are followed; ShapeEnv takes larger ones of 64 bits for infinity."""
_NUMBERS = (torch.float32, torch.float64, torch.int64, torch.int32)
_ADDITIONS: dict[Any, int] = {
    aten.add_.Tensor: 1,
    aten.sub_.Tensor: -1,
    aten.add_.Scalar: 1,
    aten.sub_.Scalar: -1,
    aten._foreach_add_.Scalar: 1,
    aten._foreach_sub_.Scalar: -1,
    aten._foreach_add_.Tensor: 1,
}


_SAME_MEMORY = frozenset(
    (aten.detach.default, aten.alias.default, aten.view.default, aten.squeeze.default, aten.unsqueeze.default)
)
_SAME_VALUE = frozenset(
    (aten.clone.default, aten.lift_fresh_copy.default, aten._to_copy.default, aten.any.default, aten.all.default)
)
_NEGATIONS = frozenset((aten.logical_not.default, aten.bitwise_not.default))
_LOGICAL: dict[Any, Callable[[Any, Any], Any]] = {
    aten.logical_and.default: operator.and_,
    aten.logical_or.default: operator.or_,
    aten.bitwise_and.Tensor: operator.and_,
    aten.bitwise_or.Tensor: operator.or_,
}
_COMPARISONS: dict[Any, Callable[[Any, Any], Any]] = {
    getattr(getattr(aten, name), kind): getattr(operator, name)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for kind in ("Scalar", "Tensor")
}
_DIVISIONS: dict[Any, Callable[[Any, Any], Any]] = {
    aten.remainder.Scalar: operator.mod,
    aten.floor_divide.default: operator.floordiv,
}
_ARITHMETIC: dict[Any, Callable[[Any, Any], Any]] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.mul.Tensor: operator.mul,
    **_DIVISIONS,
}


def host_value(world: CaptureContext, tensor: Any) -> Any:
    """Returns ``tensor.item()`` at this point of the step if the prologue can compute it; else ``None``.

    The result is a symbolic number, or a plain bool, whose value is guarded.
    """
    record = world.heap.record_of(tensor)
    if safe_isinstance(record, TensorRecord):
        return _of_input(world, record, None)
    if type(tensor) is not compat.FakeTensor or not world.tracer.has_node(tensor):
        return None
    number = _computed(world, world.tracer.node_of(tensor), None)
    if number is None:
        world.random_draws.of_torch.foretell(world.tracer.node_of(tensor))
        return world.host_reads.number(tensor)
    return world.truth(number) if tensor.dtype is torch.bool else number


def _of_input(world: CaptureContext, record: TensorRecord, before: fx.Node | None) -> Any:
    """Returns the number in an input when ``before`` reads it, or now if that is ``None``."""
    if record.real.numel() != 1 or not _readable(world, record) or record.entry_storage is not None:
        return None
    writes = [node for node in world.writes.to(record.shadow) if before is None or node < before]
    if record.real.dtype is torch.bool:
        return None if writes else world.heap.numbers.item_of(record)
    if record.real.dtype not in _NUMBERS:
        return None
    if writes and record.real.untyped_storage().nbytes() != record.real.element_size():
        return None  # they may write other elements of the same storage
    added = [_added(world, node, record.real.dtype) for node in writes]
    if any(amount is None for amount in added):
        return None
    number = world.heap.numbers.item_of(record)
    if record.real.dtype == torch.float32 and added and not _is_exact(world, record, number, added):
        return None  # the kernel rounds each sum, and no symbolic number does
    for amount in added:
        number = number + amount
        if not _fits(world, number, record.real.dtype):
            return None
    return number


def _fits(world: CaptureContext, number: Any, dtype: torch.dtype) -> bool:
    """Returns True if an integer of the dtype holds a result, which is guarded; a kernel loses the bits beyond."""
    bound = _BOUNDS.get(dtype)
    return bound is None or bool(world.truth(number < bound) and world.truth(number > -bound))


def _is_exact(world: CaptureContext, record: TensorRecord, number: Any, added: list[Any]) -> bool:
    """Returns True if sums of a number at entry and of amounts are exact in float32, which is guarded."""
    if not all(_is_integer(amount) for amount in added):
        return False
    if counts_steps(record.kind, record.source.label):
        return True
    with compat.real_world():
        value = record.real.item()
    if not value.is_integer():
        return False
    sources = world.heap.sources
    world.heap.guard("is", sources.call(sources.slot(world.heap.numbers.item_source(record), "is_integer")), True)
    if all(type(amount) in (int, float) for amount in added):
        bound, sums = EXACT_IN_FLOAT32 - sum(abs(amount) for amount in added), [number]
    else:
        bound, sums = EXACT_IN_FLOAT32, list(itertools.accumulate(added, initial=number))
    return all(world.truth(each < bound) and world.truth(each > -bound) for each in sums)


def _readable(world: CaptureContext, record: TensorRecord) -> bool:
    """Returns True for a tensor on the host, and for a counter that an optimizer keeps on its device and reads."""
    return record.real.device.type == "cpu" or is_read_on_host(world, record)


def is_read_on_host(world: CaptureContext, record: TensorRecord) -> bool:
    """Returns True for a counter that an optimizer keeps on its device and reads at every update."""
    return world.heap.below(record.source, world.heap.host_roots)


def _computed(world: CaptureContext, node: fx.Node, before: fx.Node | None) -> Any:
    """Returns the number in a result computed from such inputs (``count == 0``, ``count % 10``) when ``before`` reads
    it."""
    held = node.meta.get("val")
    if not safe_isinstance(held, torch.Tensor) or held.device.type != "cpu" or any(size != 1 for size in _sizes(held)):
        return None
    drawn = world.random_draws.of_torch.of_node(node) if not world.writes.to(held) else None
    if drawn is not None:
        return drawn
    if node.op == "placeholder":
        return _of_placeholder(world, node, before)
    if node.op != "call_function" or not node.args:
        return None
    if node.target in _SAME_MEMORY or node.args[:1] == tuple(written_args(node)):
        return _computed(world, node.args[0], before)  # type: ignore[arg-type]
    if world.writes.to(held):
        return None
    given = node.args[0].meta.get("val") if safe_isinstance(node.args[0], fx.Node) else None
    if not safe_isinstance(given, torch.Tensor):
        return None
    if node.target in _SAME_VALUE:
        return _computed(world, node.args[0], node) if given.dtype is held.dtype else None  # type: ignore[arg-type]
    if node.kwargs or len(node.args) > 2:
        return None
    return _truth_of(world, node) if given.dtype is torch.bool else _result(world, node, given.dtype, held.dtype)


def _result(world: CaptureContext, node: fx.Node, dtype: torch.dtype, result: torch.dtype) -> Any:
    """Returns a comparison of numbers of dtype ``dtype``, or arithmetic of integers; else ``None``."""
    function = _COMPARISONS.get(node.target) or (_ARITHMETIC.get(node.target) if result is torch.int64 else None)
    if function is None or len(node.args) != 2:
        return None
    number = _computed(world, node.args[0], node)  # type: ignore[arg-type]
    other = _operand(world, node, dtype) if number is not None else None
    if other is None or (node.target in _DIVISIONS and (type(other) is not int or other == 0)):
        return None
    found = function(number, other)
    return found if result is torch.bool or _fits(world, found, result) else None


def _truth_of(world: CaptureContext, node: fx.Node) -> bool | None:
    """Returns the negation of a flag, or two flags combined; else ``None``."""
    function = operator.not_ if node.target in _NEGATIONS else _LOGICAL.get(node.target)
    if function is None or not all(safe_isinstance(arg, fx.Node) for arg in node.args):
        return None
    flags = [_computed(world, arg, node) for arg in node.args]  # type: ignore[arg-type]
    known = all(safe_isinstance(flag, (bool, torch.SymBool)) for flag in flags)
    return bool(function(*map(world.truth, flags))) if known else None


def _of_placeholder(world: CaptureContext, node: fx.Node, before: fx.Node | None) -> Any:
    tracer = world.tracer
    given = dict(zip(tracer.placeholders, tracer.real_inputs, strict=True)).get(node)
    record = world.heap.by_real.get(id(given))
    return _of_input(world, record, before) if safe_isinstance(record, TensorRecord) else None


def _operand(world: CaptureContext, node: fx.Node, dtype: torch.dtype) -> Any:
    """Returns the second operand of an operation with a tensor of dtype ``dtype``, as the kernel sees it, or
    ``None``."""
    other = node.args[1]
    held = other.meta.get("val") if safe_isinstance(other, fx.Node) else None
    amount = _amount(world, other) if not safe_isinstance(held, torch.Tensor) or held.dtype is dtype else None
    if amount is None and safe_isinstance(held, torch.Tensor) and held.dtype is dtype:
        return _computed(world, other, node)  # type: ignore[arg-type]
    if dtype is torch.int64:
        return amount if type(amount) is int or safe_isinstance(amount, torch.SymInt) else None
    if dtype in (torch.float32, torch.float64) and type(amount) in (int, float):
        with compat.real_world():
            return torch.tensor(amount, dtype=dtype, device="cpu").item()  # a ``with torch.device`` may be open
    return None


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the sizes of a tensor; 0 for a symbolic one."""
    return tuple(size if safe_isinstance(size, int) else 0 for size in tensor.shape)


def _added(world: CaptureContext, node: fx.Node, dtype: torch.dtype) -> Any:
    """Returns what an operation adds to each tensor it writes to, if it does only that to ``dtype``; else ``None``."""
    sign = _ADDITIONS.get(node.target)
    if sign is None or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    if any(each.meta["val"].dtype is not dtype for each in written_args(node)):  # a view of the bits
        return None
    amount = _amount(world, node.args[1])
    return None if amount is None else amount if sign > 0 else -amount


def _is_integer(amount: Any) -> bool:
    return (
        type(amount) is int or safe_isinstance(amount, torch.SymInt) or (type(amount) is float and amount.is_integer())
    )


def _amount(world: CaptureContext, value: Any) -> Any:
    if not safe_isinstance(value, fx.Node):
        return value if safe_isinstance(value, (int, float)) else None
    held = value.meta.get("val")
    if safe_isinstance(held, (torch.SymInt, torch.SymFloat)):
        return None if compat.is_unbacked(held) else held
    known = constant_of(world.tracer, value)
    return known.item() if known is not None and known.dim() == 0 else None
