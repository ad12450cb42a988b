"""Lookups in a pandas ``Index``, which never changes: the answer for given keys is a constant of the step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_ANSWERS: dict[str, type] = {
    "__contains__": bool,
    "__len__": int,
    "get_loc": int,
    "get_indexer": np.ndarray,
    "isin": np.ndarray,
    "tolist": list,
    "to_list": list,
}
"""Methods, and the class of the answer that is returned: ``get_loc`` may also find a slice or a mask."""

_KEYS = (str, int, bytes)
_MADE = "_sidefx_made"
"""Marks a copy that a capture has made: it does not change during the capture either."""


def _lookup(name: str, answer: type) -> registry.Interceptor:
    def look_up(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = _index(world, args[0])
        keys = [_plain(world, key) for key in args[1:]]
        if index is None or kwargs or any(key is ABSENT for key in keys):
            return ABSENT
        with compat.real_world():
            try:
                found = getattr(_uncached(index), name)(*keys)
            except (KeyError, TypeError, ValueError):  # the interpreted method raises it
                return ABSENT
        if type(found) is not answer or (type(found) is list and any(type(item) not in _KEYS for item in found)):
            return ABSENT
        _guard(world, args[0])
        return found

    return look_up


def _copy(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies an index, without further arguments."""
    index = _index(world, args[0])
    if index is None or kwargs or len(args) > 1:
        return ABSENT
    with compat.real_world():
        made = _uncached(index)
        made.name = index.name
    object.__setattr__(made, _MADE, True)
    _guard(world, args[0])
    return made


def _index(world: TraceWorld, value: Any) -> Any:
    """Returns the index behind a value of the step; ``None`` if there is none whose answers are constants."""
    record = world.heap.record_of(value)
    if record is None:
        return value if type(value) in _classes() and getattr(value, _MADE, False) else None
    return record.real if type(record.real) in _classes() else None


def _uncached(index: Any) -> Any:
    """Returns an index of the same items: lookups store what they find in the one that they are called on."""
    return sys.modules["pandas"].Index(index.tolist())


def _guard(world: TraceWorld, value: Any) -> None:
    """Guards the index: itself, or its items if it was another object at an earlier call."""
    record, heap = world.heap.record_of(value), world.heap
    if record is None:
        return
    if record.source.label not in world.specialization.refetched:
        heap.guard("is", record.source, record.real)
        return
    heap.guard("type", record.source, type(record.real))
    with compat.real_world():
        items = record.real.tolist()
    heap.guard("equal", heap.sources.call(heap.sources.slot(record.source, "tolist")), items)


def _plain(world: TraceWorld, key: Any) -> Any:
    """Returns a key, or a list of keys; :data:`ABSENT` for anything else."""
    if type(key) in _KEYS:
        return key
    if type(key) not in (list, tuple):
        return ABSENT
    world.touch(key)
    return list(key) if all(type(item) in _KEYS for item in key) else ABSENT


def _classes() -> tuple[type, ...]:
    """Returns pandas' own classes of an index whose methods have no effects."""
    pandas = sys.modules["pandas"]
    return (pandas.Index, pandas.RangeIndex)


@registry.late
def register() -> bool:
    """Registers the interceptors once pandas is imported."""
    index = getattr(sys.modules.get("pandas"), "Index", None)
    if not safe_isinstance(index, type):
        return False
    for name, answer in _ANSWERS.items():
        registry.METHOD_INTERCEPTORS.append((index, name, _lookup(name, answer)))
    registry.METHOD_INTERCEPTORS.append((index, "copy", _copy))
    return True
