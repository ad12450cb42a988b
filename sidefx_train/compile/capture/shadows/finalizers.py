"""Objects whose death the program notices: ``__del__``, generators that clean up, weak references that call back."""

from __future__ import annotations

import abc
import ctypes
import functools
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.interpreter.generator_finalizers import HOLDERS, has_pending_finally
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord, ListRecord
from sidefx_train.compile.capture.shadows.containers.sets import SetRecord
from sidefx_train.compile.capture.shadows.containers.traversal import held_by
from sidefx_train.compile.capture.shadows.objects import weak_references
from sidefx_train.compile.capture.shadows.records import InstanceRecord, Record
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.plain_values import is_plain
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


HOLDING: frozenset[type] = frozenset(
    {
        *(list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict),
        *(types.CellType, types.FunctionType, types.MethodType, functools.partial),
    }
)
"""Classes of Python's own whose instances take what they hold with them when they die."""

_MOST = 200
"""Objects looked at, of what a variable holds."""


def takes_along(cls: type) -> bool:
    """True if what instances of a class hold dies with them. A library's context managers, say, are left first."""
    return cls in HOLDING or not (is_library(cls.__module__) or issubclass(cls, (type, torch.Tensor, torch.nn.Module)))


def deletes(cls: type) -> bool:
    """True if instances of a class run Python code when they die."""
    return any(
        safe_isinstance(vars(base).get("__del__"), types.FunctionType) for base in type.__getattribute__(cls, "__mro__")
    )


class Retired:
    """What a shadow of a class with ``__del__`` becomes when its capture is over."""


class RetiredAbstract(abc.ABC):  # noqa: B024 - for the layout in memory, which is another one below ``ABC``
    """Likewise, for classes below ``abc.ABC``."""


def retire(shadow: Any) -> None:
    """Has a shadow die without its ``__del__``."""
    for cls in (Retired, RetiredAbstract):
        try:
            object.__dict__["__class__"].__set__(shadow, cls)
        except TypeError:  # another layout in memory
            continue
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(shadow))  # it never dies, not even when the process ends


def finalization_observable(heap: ShadowTableAPI, value: Any) -> bool:
    """True if the program notices when a value of the trace dies, or something that it holds."""
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
    """True for instances that a weak container may get to know behind a break, while a variable holds them."""
    if is_library(cls.__module__) or issubclass(cls, torch.nn.Module):
        return False
    return bool(type.__getattribute__(cls, "__weakrefoffset__") != 0)  # ``dir`` would run a metaclass's own method


def _observed_outside(real: Any) -> bool:
    return weak_references.calls_back(real) or (deletes(type(real)) and not is_library(type(real).__module__))


def check_dropped(heap: ShadowTableAPI) -> None:
    """Refuses a step that takes an object from where it is held outside, if its death may be noticed.

    Its stand-in does not die in the step, as the object may in eager, and the object dies after the graph.

    Raises:
        Unsupported: the step does.
    """
    for record in list(heap.by_real.values()):
        for item in _taken_from(heap, record):
            why = _observed_taken(heap, item)
            if why:
                heap.refuse("SFX115", f"takes a {type(item).__qualname__} from {record.source.label}, {why}")


def _observed_taken(heap: ShadowTableAPI, item: Any) -> str:
    cls = type(item)
    if cls in HOLDERS:
        return "which cleans up when it dies" if has_pending_finally(item) else ""
    if not takes_along(cls):
        return ""
    if id(item) in heap.watched:
        return f"to which {heap.watched[id(item)]} refers weakly"
    return "whose __del__ runs when it dies" if deletes(cls) else ""


def _taken_from(heap: ShadowTableAPI, record: Record) -> Iterator[Any]:
    """Objects that a container or instance from outside held, and its stand-in does not hold any more."""
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
    for old, new in pairs:
        known = heap.record_of(new) if new is not None else None
        if old is not new and (known is None or known.real is not old):
            yield old
