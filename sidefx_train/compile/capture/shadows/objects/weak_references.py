"""Weak references during a capture.

A weak reference of the trace refers to a shadow. Its callback must not run when the shadow is finalized after the
capture, so one with a callback is a :class:`ShadowRef`, which keeps the callback for the epilogue. If an object created
in the step is finalized in the step, the callback is interpreted. A step is refused if the key of an entry that it
leaves in an outside dict was finalized: the callback would have removed the entry.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.guards.source import Source
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


class ShadowRef(weakref.ref):  # type: ignore[type-arg]
    """A reference whose real counterpart has a callback."""

    __slots__ = ("callback",)

    def __new__(cls, target: Any, callback: Any = None, died: Callable[[Any], None] | None = None) -> ShadowRef:
        made: ShadowRef = super().__new__(cls, target, died)
        return made

    def __init__(self, target: Any, callback: Any = None, died: Callable[[Any], None] | None = None) -> None:
        super().__init__(target, died)  # type: ignore[call-arg]
        self.callback = callback


def check_keys(heap: ShadowTableAPI, base: Source, keys: Iterable[Any]) -> None:
    """Refuses to leave an entry in a dict whose key was finalized in the step: its callback would have removed it."""
    if any(safe_isinstance(key, ShadowRef) and key() is None for key in keys):
        heap.refuse("SFX104", f"puts a key into {base.label} that is finalized in the step, with a weakref callback")


def shadow_of(heap: ShadowTableAPI, real: Any, base: Source) -> Any:
    """Returns the shadow of an outside reference; the reference itself if it is dead or its referent passes through."""
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
    """Returns a real reference equal to a traced one, :data:`ABSENT` if its referent was created in the step."""
    target = ref()
    record = heap.record_of(target) if target is not None else None
    return ABSENT if record is None else weakref.ref(record.real)
