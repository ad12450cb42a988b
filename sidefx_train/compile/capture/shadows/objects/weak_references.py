"""Weak references during a capture.

A weak reference of the trace refers to a shadow. It must not call anybody back when the shadow dies after the capture,
so one with a callback is a :class:`ShadowRef`, which remembers the callback for the epilogue. The callback is
interpreted where an object of the step's own dies in the step. Where the key of an entry that the step leaves in a dict
from outside has died all the same, the callback should have run: such a step is refused.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.guards.source import Source
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


class ShadowRef(weakref.ref):  # type: ignore[type-arg]
    """A reference that has a callback outside."""

    __slots__ = ("callback",)

    def __new__(cls, target: Any, callback: Any = None, died: Callable[[Any], None] | None = None) -> ShadowRef:
        made: ShadowRef = super().__new__(cls, target, died)
        return made

    def __init__(self, target: Any, callback: Any = None, died: Callable[[Any], None] | None = None) -> None:
        super().__init__(target, died)  # type: ignore[call-arg]
        self.callback = callback


def check_keys(heap: ShadowTableAPI, base: Source, keys: Iterable[Any]) -> None:
    """Refuses to leave an entry in a dict whose key died in the step: its callback would have taken it out."""
    if any(safe_isinstance(key, ShadowRef) and key() is None for key in keys):
        heap.refuse("SFX104", f"puts an object into {base.label} that dies in the step and calls back there")


def calls_back(target: Any) -> bool:
    """True if the death of an outside object runs code of the program, not just that of a weak container."""
    callbacks = [_callback_of(ref) for ref in weakref.getweakrefs(target)]
    return any(call is not None and not is_library(getattr(call, "__module__", None) or "") for call in callbacks)


def _callback_of(ref: Any) -> Any:
    """Who is called when what a reference, or a proxy, leads to dies: an attribute of a proxy is that of the object."""
    if issubclass(type(ref), weakref.ReferenceType):
        return ref.__callback__
    return next(iter(gc.get_referents(ref)), None)


def shadow_of(heap: ShadowTableAPI, real: Any, base: Source) -> Any:
    """The stand-in of an outside reference; itself where it is dead, or refers to what stands for itself."""
    target = real()
    place = heap.sources.call(base)
    if target is None:
        heap.guard("is", place, None)
        return real
    shadow = heap.shadow(target, place)
    heap.watched[id(target)] = base.label
    if shadow is target or type(real) is not weakref.ref:
        return real
    return weakref.ref(shadow) if real.__callback__ is None else ShadowRef(shadow)


def real_ref(heap: ShadowTableAPI, ref: Any) -> Any:
    """A real reference equal to one of the trace, :data:`ABSENT` if it refers to an object made in the step."""
    target = ref()
    record = heap.record_of(target) if target is not None else None
    return ABSENT if record is None else weakref.ref(record.real)
