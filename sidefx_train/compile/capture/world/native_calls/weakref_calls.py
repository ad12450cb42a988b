"""Creates and calls weak references in a step, and uses proxies."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.shadows.objects.weak_references import ShadowRef
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext
    from sidefx_train.compile.capture.shadows.records import Record


def through(world: CaptureContext, proxy: Any) -> Any:
    """Returns the referent of a proxy, as the step sees it.

    Raises:
        ReferenceError: it is dead, as when using the proxy.
    """
    record, target = world.heap.record_of(proxy), _target(proxy)
    if record is None:  # created in the step
        return target
    if not any(ref is proxy for ref in weakref.getweakrefs(target)):
        world.heap.refuse("SFX104", f"uses {record.source.label}, a proxy whose referent is unknown")
    finds = world.heap.sources.const(functools.partial(_target, proxy), record.source.label)
    return world.heap.shadow(target, world.heap.sources.call(finds))


def _target(proxy: Any) -> Any:
    return getattr(proxy.__init__, "__self__", None)


def make(world: CaptureContext, args: tuple[Any, ...]) -> Any:
    """``weakref.ref(target, callback)`` in the step; :data:`ABSENT` if Python should raise."""
    if not args or len(args) > 2:
        return ABSENT
    record = note_target(world, args)
    if len(args) == 1 or args[1] is None:
        return world.guarded(weakref.ref, args[:1], {})
    if record is not None:
        return world.guarded(ShadowRef, args, {})
    kind = trace_rules.describe(type(args[0]))
    return world.guarded(ShadowRef, (*args, lambda ref: _died(world, ref, kind)), {})


def note_target(world: CaptureContext, args: tuple[Any, ...]) -> Record | None:
    """Notes that a reference or proxy of the step shows whether its referent is alive; returns the record of one from
    outside."""
    record = world.heap.record_of(args[0]) if args else None
    if record is not None:
        world.heap.watched[id(record.real)] = str(world.locate() or "the step")
    return record


def _died(world: CaptureContext, ref: Any, kind: str) -> None:
    """Interprets the callback of a reference whose referent was just finalized, or lets it be finalized outside."""
    interp = world.interp
    if interp.stopped is not None:
        return
    try:
        interp.call(ref.callback, (ref,), {})
    except BaseException as error:
        if world.unheard(error):
            raise
        interp.stopped = None
        interp.note_dropped(f"a {kind}, to which a weak reference with a callback refers")


def called(world: CaptureContext, ref: Any) -> Any:
    """Returns the result of calling a reference."""
    record = world.heap.record_of(ref)
    if record is not None and record.shadow is record.real:
        return world.heap.shadow(ref(), world.heap.sources.call(record.base))
    return ref()
