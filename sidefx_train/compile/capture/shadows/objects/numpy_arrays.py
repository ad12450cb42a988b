"""NumPy arrays: graph inputs where they become tensors, guarded by contents where NumPy code reads them.

The shadow of an array is a read-only copy. Shape, dtype and strides are guarded; contents only once something reads
them, so a batch of arrays that goes through ``torch.from_numpy`` is an input like any tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.kinds.relations import overlaps
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows.deferred_values import message_of
from sidefx_train.compile.capture.shadows.records import Record, TensorRecord
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.write_log import WriteLog
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI

_METADATA = frozenset({"shape", "dtype", "ndim", "size", "itemsize", "nbytes", "strides"})
_MOST_COMPARED = 1 << 16
"""Bytes of an array whose contents are guarded: comparing more takes as long as the program's own work with them."""
CONTENTS = ".tobytes()"
"""End of the label of an array's contents."""
SHAPE = ".shape"
"""End of the label of an array's shape."""

_WRITES = frozenset({"setitem", "delitem"})


class ArrayRecord(Record):
    """An array.

    Attributes:
        tensor: the fake tensor over its memory, if the step has created one.
        read: its contents are guarded.
        read_early: a call before the graph reads its contents.
        shown: a deferred call will print its contents.
        drawn: its contents are random numbers of the step, or computed from numbers that change.
        rewritten: a draw before the graph writes to it; the shadow has what this call's draw leaves there.
        measured: its metadata are guarded, as those of an array from outside are, unless its shape changes.
    """

    def __init__(self, heap: ShadowTableAPI, real: np.ndarray[Any, Any], source: Source) -> None:
        self._contents = real.copy(order="K")
        shadow = np.lib.stride_tricks.as_strided(self._contents, writeable=False)
        shadow.setflags(write=False)
        super().__init__(heap, real, shadow, source)
        self.tensor: torch.Tensor | None = None
        self.read = self.read_early = False
        self.shown = False
        self.drawn = self.rewritten = False
        self.measured = False

    def measure(self) -> None:
        """Guards the array's dtype, shape and strides."""
        if self.resizes:
            self.heap.refuse("SFX104", f"reads the shape of {self.source.label}, a NumPy array whose shape changes")
        if not self.measured:
            self.measured = True
            for name in ("dtype", "shape", "strides"):
                self.heap.guard("equal", self.heap.sources.slot(self.source, name), getattr(self.real, name))

    def refresh(self) -> None:
        """Copies the array's contents to its shadow, after a write to it that is made at every call."""
        np.copyto(self._contents, self.real)

    @property
    def current(self) -> np.ndarray[Any, Any]:
        """The array with what it holds now: the outside one, or a copy if a draw of this capture has written to it."""
        return self._contents if self.rewritten else self.real

    @property
    def computed(self) -> bool:
        """True if what NumPy makes of it is computed before the graph, at every call."""
        return self.drawn or self.changes or self.real.nbytes > _MOST_COMPARED

    @property
    def changes(self) -> bool:
        """True if its contents have changed since an earlier capture."""
        spec = self.heap.specialization
        return self.source.label in spec.changing_arrays or self.source.label in spec.perhaps_changing

    @property
    def resizes(self) -> bool:
        """True if its shape has changed since an earlier capture."""
        label, spec = self.source.label + SHAPE, self.heap.specialization
        return label in spec.changing_arrays or label in spec.perhaps_changing

    @property
    def is_laid_out(self) -> bool:
        """True if the elements of the shadow are as far apart as the array's."""
        return self._contents.strides == self.real.strides

    def fill(self) -> None:
        if self.drawn:
            self.heap.refuse("SFX103", f"reads {self.source.label}, an array of numbers that differ at every call")
        if self.changes:
            self.heap.refuse("SFX104", f"reads {self.source.label}, a NumPy array whose contents change")
        if not self.read:
            if self.real.nbytes > _MOST_COMPARED:
                size = f"{self.real.nbytes / 2**20:.1f} MiB"
                why = f"reads {self.source.label}, a NumPy array of {size}, whose contents every call would compare"
                self.heap.refuse("SFX104", why)
            self.read = True
            contents = self.heap.sources.call(self.heap.sources.slot(self.source, "tobytes"))
            self.heap.guard("equal", contents, self.real.tobytes())

    def look(self, name: str) -> None:
        """Called when the step reads the attribute ``name``."""
        if name in _METADATA:
            self.measure()
        elif not callable(getattr(self.shadow, name)):
            self.fill()

    def operate(self, name: str) -> None:
        """Called when the step applies an operator to the array."""
        if name in _WRITES or (name.startswith("i") and name[1:] in _IN_PLACE):
            self.heap.refuse("SFX104", f"writes into {self.source.label}, a NumPy array")
        self.fill()

    def as_tensor(self) -> torch.Tensor:
        """Returns a fake tensor over the array's memory, like ``torch.from_numpy``."""
        if self.tensor is not None:
            return self.tensor.detach()
        with compat.real_world():
            real = torch.from_numpy(self.real)
        self.tensor = self.heap.shadow(real, self.heap.sources.array(self.source))
        return self.tensor

    def part(self, array: np.ndarray[Any, Any]) -> torch.Tensor | None:
        """Returns a fake tensor over the same part of the memory as a view of the shadow; ``None`` if torch cannot
        express it."""
        real, size = self.real, self.real.itemsize
        alike = self._contents.strides == real.strides and array.dtype == real.dtype and real.flags.writeable
        if (
            not alike
            or not array.size
            or any(stride < 0 or stride % size for stride in (*array.strides, *real.strides))
        ):
            return None
        addresses = [each.__array_interface__["data"][0] for each in (array, self._contents)]
        whole = self.as_tensor()
        strides = tuple(stride // size for stride in array.strides)
        offset = whole.storage_offset() + (addresses[0] - addresses[1]) // size
        return torch.as_strided(whole, array.shape, strides, offset)

    def _is_written(self) -> bool:
        """Returns True if C code has written to the shadow without asking whether it may."""
        shadow, real = self.shadow, self.real
        return shadow.shape != real.shape or shadow.dtype != real.dtype or shadow.tobytes() != real.tobytes()

    def check(self, writes: WriteLog) -> None:
        """Refuses a step that both reads the array and writes to it through a tensor, or whose C code writes to it."""
        if not (self.read or self.read_early or self.shown):
            return
        if not self.rewritten and self._is_written():
            self.heap.refuse("SFX104", f"C code writes into {self.source.label}, a NumPy array")
        known = [record for record in self.heap.by_real.values() if safe_isinstance(record, TensorRecord)]
        written = [record for record in known if writes.to(record.memory)]
        through = self.tensor is not None and writes.to(self.tensor)
        if through or overlaps(self.real, [record.real for record in written]):
            self.heap.refuse("SFX104", f"reads {self.source.label} and writes to it through a tensor")
        if written:
            self.heap.guard("apart", self.source, tuple(record.source for record in written))


class MadeArrays:
    """Arrays created in the step with tensors over their memory: constants of the graph that share no memory with them.

    This is exact as long as neither is written afterwards and the array does not leave the step.
    """

    def __init__(self) -> None:
        self._made: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], torch.Tensor]] = []

    def substitute(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the data of the constant: a copy if it can have the array's strides."""
        copy = array.copy(order="K")
        return copy if copy.strides == array.strides else array

    def note(self, array: np.ndarray[Any, Any], tensor: torch.Tensor) -> None:
        """Records that ``tensor`` views an array's memory."""
        self._made.append((array, array.copy(), tensor))

    def check(self, heap: ShadowTableAPI, writes: WriteLog) -> None:
        """Refuses a step that could observe the missing memory sharing; called once, at the end."""
        if any(array.tobytes() != contents.tobytes() for array, contents, _ in self._made):
            heap.refuse("SFX104", "writes to a NumPy array made in the step that shares memory with a tensor")
        if any(writes.to(tensor) for _, _, tensor in self._made):
            heap.refuse("SFX104", "writes through a tensor to a NumPy array made in the step")
        owners = [weakref.ref(_owner(array)) for array, _, _ in self._made]
        self._made.clear()
        if any(owner() is not None for owner in owners):
            heap.refuse("SFX104", "cannot rebuild a NumPy array of the step that shares memory with a tensor")


def _owner(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the array that owns the memory."""
    return array.base if isinstance(array.base, np.ndarray) else array


def writes_unasked(fn: Any, args: tuple[Any, ...]) -> bool:
    """Returns True for a method of NumPy's that changes a read-only array, which is an outside one, too."""
    name, owner = attribute_of(fn, "__name__"), attribute_of(fn, "__self__")
    if name == "at":
        targets = args[:1] if type(owner) is np.ufunc else args[1:2] if fn is np.ufunc.at else ()
    elif type(name) is str and name in _UNASKED:
        targets = (owner, *args[:1])
    else:
        return False
    return any(safe_isinstance(target, np.ndarray) and not target.flags.writeable for target in targets)


def shows_copy(name: str, *values: Any) -> bool:
    """Returns True if the attribute of an array, or the function, says something else of a read-only copy than of the
    array itself: whether it may be written to, where its memory is, and whose."""
    return name in _OF_MEMORY and any(safe_isinstance(each, np.ndarray) and not each.flags.writeable for each in values)


def says_read_only(error: Exception, given: Iterable[Any]) -> bool:
    """Returns True if a call failed because it would write to a read-only array: an outside one."""
    text = message_of(error)
    if "read-only" not in text and "writ" not in text:
        return False
    arrays = (value.base if type(value) is np.flatiter else value for value in given)
    return any(safe_isinstance(array, np.ndarray) and not array.flags.writeable for array in arrays)


_UNASKED = frozenset({"resize", "setflags", "__setstate__"})
"""Methods of arrays that change read-only ones, or let later code do it."""

_OF_MEMORY = frozenset(
    {"flags", "base", "data", "ctypes", "__array_interface__", "__array_struct__"}
    | {"memoryview", "shares_memory", "may_share_memory", "require"}
)
"""Attributes of arrays, and functions, of NumPy and builtins, that arrays are given to."""

_IN_PLACE = frozenset(
    {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and", "or", "xor"}
)


def array_shadow(heap: ShadowTableAPI, real: np.ndarray[Any, Any], source: Source, drawn: bool = False) -> ArrayRecord:
    """Returns the record of an array, with its metadata guarded if it is from outside and keeps its shape."""
    heap.guard("type", source, np.ndarray)
    record = ArrayRecord(heap, real, source)
    if not drawn and not record.resizes:
        record.measure()
    return record
