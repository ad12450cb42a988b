"""Objects with observable finalization: ``__del__``, generators with a pending finally, weakref callbacks."""

from __future__ import annotations

import abc
import ctypes
import functools
import gc
import io
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.guards.source import Pick
from sidefx_train.compile.capture.interpreter.generator_finalizers import HOLDERS, has_pending_finally
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord, ListRecord
from sidefx_train.compile.capture.shadows.containers.sets import SetRecord
from sidefx_train.compile.capture.shadows.containers.traversal import held_by
from sidefx_train.compile.capture.shadows.records import InstanceRecord, Record
from sidefx_train.compile.common.library_modules import calls_back, is_library
from sidefx_train.compile.common.plain_values import PLAIN_TYPES, is_plain
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import deletes, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


HOLDING: frozenset[type] = frozenset(
    {
        *(list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict),
        *(types.CellType, types.FunctionType, types.MethodType, functools.partial),
    }
)
"""Classes of Python's own whose instances keep what they hold alive."""

_MOST = 200
"""Limit of inspected objects reachable from a variable."""


def takes_along(cls: type) -> bool:
    """Returns True if instances own what they hold. A library's context managers, say, are exited first."""
    return cls in HOLDING or not (is_library(cls.__module__) or issubclass(cls, (type, torch.Tensor, torch.nn.Module)))


class Retired:
    """Class of shadows with ``__del__`` after their capture."""


class RetiredAbstract(abc.ABC):  # noqa: B024 - classes below ``ABC`` have another memory layout
    """The same for classes below ``abc.ABC``."""


def retire(shadow: Any) -> None:
    """Lets a shadow be finalized without its ``__del__``."""
    for cls in (Retired, RetiredAbstract):
        try:
            object.__dict__["__class__"].__set__(shadow, cls)
        except TypeError:  # another memory layout
            continue
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(shadow))  # never finalized, not even at exit


def finalization_observable(heap: ShadowTableAPI, value: Any) -> bool:
    """Returns True if the program can observe the finalization of a traced value or of something it holds."""
    todo: list[Any] = [value]
    seen: set[int] = set()
    while todo and len(seen) < _MOST:
        item = todo.pop()
        if id(item) in seen or safe_isinstance(item, torch.Tensor):  # torch has weak references of its own to those
            continue
        seen.add(id(item))
        if has_pending_finally(item):
            return True
        record = heap.record_of(item)
        if item is value and _may_be_missed(type(item)):
            return True
        if weakref.getweakrefcount(item) if record is None else _observed_outside(record.real):
            return True
        held = item if record is None else record.real
        if takes_along(type(held)) and (record is None or type(held) in HOLDING):
            todo += gc.get_referents(held)
    return False


def _may_be_missed(cls: type) -> bool:
    """Returns True for instances that a weak container may start to refer to after a break, while a variable holds
    them."""
    if is_library(cls.__module__) or issubclass(cls, torch.nn.Module):
        return False
    return bool(type.__getattribute__(cls, "__weakrefoffset__") != 0)  # ``dir`` would run a metaclass's own method


def _observed_outside(real: Any) -> bool:
    return calls_back(real) or (deletes(type(real)) and not is_library(type(real).__module__))


def check_dropped(heap: ShadowTableAPI) -> None:
    """Refuses a step that removes an object from an outside holder if its finalization may be observable.

    The shadow is not finalized in the step, as eager's object may be; the real object is finalized after the graph.

    Raises:
        Unsupported: the step removes such an object.
    """
    for record in list(heap.by_real.values()):
        for item in _taken_from(heap, record):
            why = _observed_taken(heap, item)
            if why:
                heap.refuse("SFX115", f"takes a {type(item).__qualname__} from {record.source.label}, {why}")
    for cell in heap.cells.values():
        changed = cell.emptied or cell.value is not cell.initial
        if changed and any(map(_is_open_file, gc.get_referents(cell.real))):
            heap.refuse("SFX115", f"takes an open file from {cell.source.label}")


class KeepsFiles(Pick):
    """Tells whether what an instance or a dict holds by some names changes no files when it is finalized.

    Args:
        names: the names.
    """

    __slots__ = ("_names",)

    def __init__(self, names: tuple[Any, ...]) -> None:
        self.operands, self.label, self._names = (), f"{', '.join(map(str, names))}: no open file", names

    def __call__(self, holder: Any, *_: Any) -> bool:
        held = holder if type(holder) is dict else object.__getattribute__(holder, "__dict__")
        return not any(_may_change_files(dict.get(held, name)) for name in self._names)


def may_have_freed_files(heap: ShadowTableAPI) -> bool:
    """Returns True if the step has so far removed an object from an outside holder that may change files when it is
    finalized: an open file, say, writes what it has buffered. Guards that there is none in its place at later calls.

    Raises:
        Unsupported: there is one now.
    """
    for cell in heap.cells.values():
        if (cell.emptied or cell.value is not cell.initial) and not is_plain(cell.initial):
            return True
    for space in heap.namespaces.values():
        for name, now in space.values.items():
            before = space.snapshot.get(name, ABSENT)
            if now is not before and name in space.real and not is_plain(before):
                return True
    for record in list(heap.by_real.values()):
        for item in _taken_from(heap, record):
            if _may_change_files(item):
                what = f"takes a {type(item).__qualname__} from {record.source.label}, which may change files"
                heap.refuse("SFX115", what)
        if safe_isinstance(record, ListRecord) and not record.filled and (record.edits or _is_bounded(record)):
            return True
        names: tuple[Any, ...] = ()
        if safe_isinstance(record, InstanceRecord) and record.has_dict:
            names = tuple(sorted({*record.written, *record.removed}))
        elif safe_isinstance(record, DictRecord) and type(record.real) is dict and not record.filled:
            names = tuple(
                key for key, now in dict.items(record.shadow) if is_plain(key) and now is not record.snapshot.get(key)
            )
        if names:
            heap.guard("is", heap.sources.picked(record.base, KeepsFiles(names)), True)
    return False


def _is_bounded(record: ListRecord) -> bool:
    return type(record.real) is deque and record.real.maxlen is not None and bool(record.shadow)


def _may_change_files(item: Any) -> bool:
    """Returns True for an object that runs code when it is finalized, or that holds such an object or very many."""
    todo: list[Any] = [item]
    seen: set[int] = set()
    while todo:
        held = todo.pop()
        cls = type(held)
        if id(held) in seen or cls in PLAIN_TYPES or issubclass(cls, (type, types.ModuleType, torch.Tensor)):
            continue
        seen.add(id(held))
        if len(seen) >= _MOST or deletes(cls) or issubclass(cls, io.IOBase) or has_pending_finally(held):
            return True
        if any(_has_callback(ref) for ref in weakref.getweakrefs(held)):
            return True
        todo += gc.get_referents(held)
    return False


_FILES = frozenset({io.TextIOWrapper, io.BufferedWriter, io.BufferedReader, io.BufferedRandom, io.FileIO})


def _is_open_file(item: Any) -> bool:
    return type(item) in _FILES and not item.closed


def _has_callback(ref: Any) -> bool:
    return not issubclass(type(ref), weakref.ReferenceType) or ref.__callback__ is not None


def _observed_taken(heap: ShadowTableAPI, item: Any) -> str:
    cls = type(item)
    if cls in HOLDERS:
        return "which has a pending finally" if has_pending_finally(item) else ""
    if id(item) in heap.watched:
        return f"to which {heap.watched[id(item)]} has a weak reference"
    if _is_open_file(item):
        return "which is open"
    if not takes_along(cls):
        return ""
    if calls_back(item) or _has_finalizer(item):
        return "to which a weak reference with a callback refers"
    return "whose class has __del__" if deletes(cls) else ""


def _has_finalizer(item: Any) -> bool:
    """Returns True if ``weakref.finalize`` calls any function for an object: the program may have asked for
    ``os.remove`` or ``print``."""
    callbacks = [ref.__callback__ for ref in weakref.getweakrefs(item) if issubclass(type(ref), weakref.ReferenceType)]
    return any(type(each) is weakref.finalize and each.alive for each in callbacks)


def _taken_from(heap: ShadowTableAPI, record: Record) -> Iterator[Any]:
    """Yields objects that an outside container or instance held and its shadow no longer holds."""
    pairs: list[tuple[Any, Any]] = []
    if safe_isinstance(record, InstanceRecord):
        now = object.__getattribute__(record.shadow, "__dict__") if record.has_dict else {}
        pairs = [(record.space.get(name), now.get(name)) for name in {*record.written, *record.removed}]
    elif safe_isinstance(record, DictRecord) and not record.filled:  # the program's own keys are not hashed here
        written = {key: value for key, value in dict.items(record.shadow) if is_plain(key)}
        pairs = [(old, written[key]) for key, old in dict.items(record.real) if is_plain(key) and key in written]
    elif safe_isinstance(record, (DictRecord, ListRecord, SetRecord)) and record.filled:
        kept = {id(known.real) for item in held_by(record.shadow) if (known := heap.record_of(item)) is not None}
        pairs = [(old, None) for old in held_by(record.real) if id(old) not in kept]
    elif safe_isinstance(record, ListRecord):
        pairs = [(old, None if new is ABSENT else new) for old, new in record.lost()]
    for old, new in pairs:
        known = heap.record_of(new) if new is not None else None
        if old is not new and (known is None or known.real is not old):
            yield old
