"""Storage replacement in a step: ``t.data = x``, ``t.set_(x)``, a ``resize_`` past the end of the storage.

The fake tensor takes the other tensor's storage, as in eager, and later operations on it are recorded on a view of the
other tensor. An outside tensor keeps a second fake for its entry storage (``TensorRecord.entry_storage``). The epilogue
replaces the storage of the real tensor before any other effect.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.eager_parity.memory_overlap import overlaps_itself
from sidefx_train.compile.capture.recording.eager_parity.resize import set_layout
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.common.thread_warnings import no_warnings
from sidefx_train.compile.graph.kernel_strides import without_outs
from sidefx_train.compile.graph.strided_layout import fills_its_range
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI

aten = torch.ops.aten


class StorageRebinding:
    """Tensors whose storage the step replaced.

    Args:
        heap: the shadow table.

    Attributes:
        owners: those tensors, by the node of the value that provided the storage.
        count: number of replacements.
        warn: issues a warning at the program's current line.
    """

    def __init__(self, heap: ShadowTableAPI) -> None:
        self.heap = heap
        self.owners: dict[fx.Node, torch.Tensor] = {}
        self.count = 0
        self.warn: Callable[[str], None] | None = None
        self._resized: dict[int, torch.Tensor] = {}
        self._grown: dict[int, int] = {}  # number of writes to a tensor when its storage grew
        self._replaced: list[TensorRecord] = []

    def assign(self, tensor: torch.Tensor, value: Any) -> None:
        """Runs ``tensor.data = value``."""
        if not isinstance(value, torch.Tensor) or not self.heap.tracer.has_node(value):
            tensor.data = value  # raises
            self.heap.refuse("SFX108", "assigns to Tensor.data a value that is not a tensor of the step")
        self._give(tensor, value, "assigns Tensor.data")

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles ``set_`` and ``resize_`` in the dispatcher; returns the tensor, or ``None`` for any other
        operation."""
        if func.overloadpacket is not aten.set_:
            return self._filled(func, args, kwargs) if any(a.is_out for a in func._schema.arguments) else None
        if func is aten.set_.source_Tensor:
            self._give(args[0], args[1], "calls set_")
            return args[0]
        if func is aten.set_.default:
            given = args[0]
            self._give(given, given.new_empty(0), "calls set_")
            return given
        if func is aten.set_.source_Storage_storage_offset:
            place = args[1]._cdata
            known = compat.tracked_tensors(self.heap.tracer.tracer).values()
            whole = next((t for t in known if _storage(t) == place and t.dtype == args[0].dtype), None)
            if whole is not None:
                offset, size, stride = args[2:]
                self._give(args[0], whole.as_strided(size, stride, offset), "calls set_")
                return args[0]
        self.heap.refuse("SFX108", "calls set_ with a storage")

    def _filled(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation whose ``out=`` tensors have other sizes than the results and are resized."""
        given = {a.name: kwargs[a.name] for a in func._schema.arguments if a.is_out and a.name in kwargs}
        if not all(map(_is_sized, given.values())):
            return None
        empty = {name for name, out in given.items() if self._is_empty(out)}
        if not compat.is_torchs(func):  # others write what they are given, and may not take an empty tensor
            if empty:
                self.heap.refuse("SFX108", f"{func} writes to an empty tensor, and may resize it")
            return None
        resized = empty | self._misfits(func, args, kwargs, given)
        if not resized:
            return None
        places = {_storage(given[name]) for name in resized}
        others = [*_tensors(args), *(out for name, out in given.items() if name not in resized)]
        if any(_storage(read) in places for read in others) or len(places) < len(resized):
            self.heap.refuse("SFX108", "reads a tensor in the storage that an operation with out= resizes")
        made = {name: torch.empty(0, dtype=given[name].dtype, device=given[name].device) for name in resized}
        func(*args, **{**kwargs, **made})
        for name in (name for name in given if name in resized):
            if name in empty:
                self._fill(given[name], made[name])
            else:
                self._refill(given[name], made[name])
        return tuple(given.values()) if len(given) > 1 else next(iter(given.values()))

    def _fill(self, out: torch.Tensor, value: torch.Tensor) -> None:
        """Gives an empty tensor the storage of a result."""
        if value.shape != out.shape:
            self._alone(out)
            self._give(out, value, "calls an operation with out=")
            self._resized[id(out)] = value

    def _refill(self, out: torch.Tensor, value: torch.Tensor) -> None:
        """Resizes a non-empty tensor, with torch's warning, and writes a result to it."""
        if overlaps_itself(out):
            self.heap.refuse("SFX108", "calls an operation with out= of which several elements share an address")
        if self.warn is not None:
            head, rest = _warned().split("[1]")
            middle, tail = rest.split("[2]")
            self.warn(f"{head}{list(out.shape)}{middle}{list(value.shape)}{tail}")
        out.resize_(value.shape)
        set_layout(out, tuple(value.shape), tuple(value.stride()))
        out.copy_(value)

    def _misfits(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, torch.Tensor]
    ) -> set[str]:
        """Returns the names of non-empty output tensors whose sizes differ from their results'."""
        held = {name: out for name, out in given.items() if out.numel() > 0}
        if not held or self.warn is None:
            return set()
        if torch.Tag.dynamic_output_shape in func.tags:
            self.heap.refuse("SFX108", f"{func} writes a result of data-dependent size to a non-empty tensor")
        made = {name: torch.empty(0, dtype=out.dtype, device=out.device) for name, out in given.items()}
        with compat.no_recording(), torch.no_grad():
            func(*args, **{**kwargs, **made})
        # Some fake kernels leave an empty output unchanged.
        sized = [name for name in held if _is_sized(made[name]) and made[name].numel() > 0]
        found = {name for name in sized if made[name].shape != held[name].shape}
        if found and any(out.requires_grad for out in given.values()):
            self._refuse(f"{func} resizes a tensor that requires gradients", None)
        if found and _types_of(func, args, kwargs) != tuple(out.dtype for out in given.values()):
            self._refuse(f"{func} resizes a tensor of another dtype than the result", None)
        return found

    def _is_empty(self, out: Any) -> bool:
        known = isinstance(out, torch.Tensor) and isinstance(self.heap.record_of(out), TensorRecord)
        return known and type(out.numel()) is int and out.numel() == 0

    def grow(self, tensor: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        """Runs a ``resize_`` that needs a larger storage; the contents stay at its beginning."""
        whole = self._alone(tensor)
        memory = torch.empty(math.prod(size), dtype=tensor.dtype, device=tensor.device)
        memory[: whole.numel()].copy_(whole)
        self._give(tensor, memory.view(size), "calls resize_")
        self._resized[id(tensor)] = memory
        self._grown[id(tensor)] = len(self.heap.tracer.writes.to(tensor))
        return tensor

    def mark(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns how many storages were replaced and how often that of a tensor was written, for
        :meth:`only_resized`."""
        return self.count, len(self.heap.tracer.writes.to(tensor))

    def only_resized(self, tensor: torch.Tensor, mark: tuple[int, int]) -> bool:
        """Returns True if nothing has written to a tensor since then, or since it was given a larger storage."""
        count, before = mark
        writes = self.heap.tracer.writes.to(tensor)
        if self.count != count:
            return self._grown.get(id(tensor)) == len(writes)
        return all(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in writes[before:])

    def _alone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a flat view of a tensor's storage, which no other tensor may share."""
        what = "resizes, past the end of its storage, a tensor"
        if not tensor.is_contiguous() or tensor.storage_offset() or tensor._is_view():
            self.heap.refuse("SFX108", f"{what} that is a view, or not contiguous")
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize:
            self.heap.refuse("SFX108", f"{what} that does not fill its storage")
        place = _storage(tensor)
        others = [other for other in compat.tracked_tensors(self.heap.tracer.tracer).values() if other is not tensor]
        record = self.heap.record_of(tensor)
        if isinstance(record, TensorRecord) and record.entry_storage is not None:
            self.heap.refuse("SFX108", f"{what} whose storage was replaced before")
        if any(_storage(other) == place for other in others):
            self.heap.refuse("SFX108", f"{what} whose storage other tensors share")
        return compat.alias_hidden_from_autograd(tensor).view(-1)

    def _give(self, tensor: torch.Tensor, value: torch.Tensor, what: str) -> None:
        tracer = self.heap.tracer
        record = self.heap.record_of(tensor)
        view = record.real if isinstance(record, TensorRecord) else tensor
        if view._is_view():
            self._refuse(f"{what} of a view", None)  # autograd regenerates its history in the layout at that time
        if tensor.device != value.device or value.layout is not torch.strided:
            self._refuse(f"{what}, with storage of another kind", record)
        if any(each.is_conj() or each.is_neg() or each.is_inference() for each in (tensor, value)):
            self._refuse(f"{what} of a conjugate, negative or inference tensor", record)
        if tensor.grad_fn is not None and (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            self._refuse(f"{what} of a tensor with an autograd history, to another shape or dtype", record)
        if record is None and self._is_counted_with_others(tensor):
            self._refuse(f"{what} of a tensor whose version counter is shared", record)
        if isinstance(record, TensorRecord):
            if record.edge is not None:
                self._refuse(f"{what} of a tensor with an autograd history from outside", record)
            self._leave_home(record)
        data = tracer.data_of(value)
        tensor.data = data
        compat.forget_contents(tensor)
        node = tracer.node_of(data)
        compat.track(tensor, fx.Proxy(node, tracer.tracer), tracer.tracer)
        self.owners[node] = tensor
        self._resized.pop(id(tensor), None)
        self.count += 1

    def _is_counted_with_others(self, tensor: torch.Tensor) -> bool:
        known = compat.tracked_tensors(self.heap.tracer.tracer).values()
        return any(other is not tensor and compat.share_version_counter(tensor, other) for other in known)

    def _refuse(self, reason: str, record: Any) -> None:
        stop = Unsupported("SFX108", reason, self.heap.locate())
        stop.whole = record is None  # earlier results refer to its old storage
        raise stop

    def _leave_home(self, record: TensorRecord) -> None:
        if record.entry_storage is not None:
            return
        tracer = self.heap.tracer
        self._replaced.append(record)
        record.entry_storage = compat.fake_counted(record.shadow)
        compat.track(record.entry_storage, fx.Proxy(tracer.node_of(record.shadow), tracer.tracer), tracer.tracer)

    def finish(self) -> None:
        """Records the storage of outside tensors at the end of the step."""
        for record in self.replaced():
            if record.new_storage is not None:
                continue
            if _place(record.shadow) == _place(record.entry_storage):
                record.returned = True
                continue
            record.new_storage = self.heap.tracer.data_of(record.shadow)
            resized = self._resized.get(id(record.shadow))
            record.resized = resized is not None and _storage(resized) == _storage(record.shadow)
            if (
                resized is not None
                and record.resized
                and (resized.numel() != record.shadow.numel() or not _covers_buffer(record))
            ):
                self.heap.refuse("SFX108", f"{record.source.label} was resized, and does not fill its storage any more")

    def record_of(self, tensor: torch.Tensor) -> TensorRecord | None:
        """Returns the record of a fake tensor, also of one for an outside tensor's entry storage."""
        record = self.heap.record_of(tensor)
        if isinstance(record, TensorRecord):
            return record
        return next((each for each in self._replaced if each.entry_storage is tensor), None)

    def replaced(self) -> tuple[TensorRecord, ...]:
        """Returns the outside tensors whose storage was replaced."""
        return tuple(self._replaced)


def _storage(tensor: torch.Tensor) -> int:
    return compat.storage_id(tensor) if tensor.layout is torch.strided else -1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors among arguments, also in lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _is_sized(out: Any) -> bool:
    """Returns True for a dense tensor without symbolic sizes."""
    dense = isinstance(out, torch.Tensor) and out.layout is torch.strided
    return dense and all(type(n) is int for n in (*out.shape, *out.stride(), out.storage_offset()))


def _types_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of newly allocated results; torch warns twice if the outputs' differ."""
    new = without_outs(func)
    if new is None:
        return ()
    outs = {argument.name for argument in func._schema.arguments if argument.is_out}
    with compat.no_recording(), torch.no_grad():
        made = new(*args, **{name: arg for name, arg in kwargs.items() if name not in outs})
    return tuple(value.dtype for value in _tensors(made))


@functools.cache
def _warned() -> str:
    """Returns torch's warning for a resized non-empty ``out=`` tensor, for sizes ``[1]`` and ``[2]``."""
    with compat.real_world(), no_warnings(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.neg(torch.zeros(2), out=torch.zeros(1))
    return str(said[-1].message)


def _covers_buffer(record: TensorRecord) -> bool:
    return bool(record.shadow.storage_offset() == 0) and fills_its_range(record.shadow)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _storage(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype
