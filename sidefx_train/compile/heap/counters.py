"""Numbers in one-element CPU tensors from outside: the prologue reads them, so that a step may decide on them.

Optimizers count their steps in such tensors, and some decide on the count (``RAdam``, ``ASGD``). The number at entry is
an input of the graph; additions that the step has made since are followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import _torch_compat as compat
from sidefx_train.compile.graphs import written_args
from sidefx_train.compile.heap.constants import constant_of
from sidefx_train.compile.heap.records import TensorRecord

if TYPE_CHECKING:
    from sidefx_train.compile.heap.calling import CallingWorld

if not TYPE_CHECKING:
    from sidefx_train.compile.capture.kinds import isinstance

aten = torch.ops.aten
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


def number_in(world: CallingWorld, tensor: Any) -> Any:
    """What ``tensor.item()`` is at this point of the step, if the prologue can tell; else ``None``.

    A symbolic number, or a plain bool, whose value is guarded.
    """
    record = world.heap.record_of(tensor)
    if not isinstance(record, TensorRecord) or record.real.numel() != 1 or record.real.device.type != "cpu":
        return None
    if record.home is not None:
        return None
    writes = world.writes.to(record.shadow)
    if record.real.dtype is torch.bool:
        return None if writes else world.heap.item_of(record)
    if record.real.dtype not in _NUMBERS:
        return None
    if writes and record.real.untyped_storage().nbytes() != record.real.element_size():
        return None  # they may be to other elements of the same memory
    added = [_added(world, node) for node in writes]
    if any(amount is None for amount in added):
        return None
    number = world.heap.item_of(record)
    for amount in added:
        number = number + amount
    return number


class Writes:
    """Operations of the graph that write to tensors, by the memory they write to.

    Versions of fake tensors do not tell: multi-tensor operations leave them alone.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._seen: fx.Node | None = None
        self._found: dict[int, list[fx.Node]] = {}

    def to(self, tensor: torch.Tensor) -> list[fx.Node]:
        """The operations recorded so far that wrote to a tensor's memory, in order."""
        node = next(iter(self._graph.nodes), None) if self._seen is None else self._seen.next
        while node is not None and node.op != "root":
            if node.op == "call_function":
                for place in {_storage(held) for held in _written(node)}:
                    self._found.setdefault(place, []).append(node)
            self._seen, node = node, node.next
        return self._found.get(_storage(tensor), []) + self._found.get(_ANY, [])


_ANY = -1
"""Memory that cannot be told: of the wrapped tensors of ``torch.func``."""


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return _ANY


def _written(node: fx.Node) -> list[torch.Tensor]:
    """Tensors that an operation writes to, as they were recorded."""
    held = [item.meta.get("val") for item in written_args(node)]
    return [value for value in held if isinstance(value, torch.Tensor)]


def _added(world: CallingWorld, node: fx.Node) -> Any:
    """What an operation adds to each tensor it writes to, if that is all it does; else ``None``."""
    sign = _ADDITIONS.get(node.target)
    if sign is None or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    amount = _amount(world, node.args[1])
    return None if amount is None else amount if sign > 0 else -amount


def _amount(world: CallingWorld, value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value if isinstance(value, (int, float)) else None
    held = value.meta.get("val")
    if isinstance(held, (torch.SymInt, torch.SymFloat)):
        return None if compat.is_unbacked(held) else held
    known = constant_of(world.tracer, value)
    return known.item() if known is not None and known.dim() == 0 else None
