"""Calls that are replayed after the graph, with their arguments as they are now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sidefx_train.compile.capture.interpreter.frame_objects import Place
from sidefx_train.compile.capture.shadows.deferred_values import DeferredCall, DeferredResult
from sidefx_train.compile.capture.world.argument_snapshot import ArgumentSnapshot
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.common import trace_rules


class Deferral:
    """Records calls that only show or record something; the epilogue replays them."""

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.heap, self.interp, self.tracer = world.heap, world.interp, world.tracer
        self._dtype = torch.get_default_dtype()

    def defer(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Defers a call until after the graph, with a snapshot of its arguments."""
        self.check_shown()
        shown = trace_rules.shows_text(fn)
        snapshots = ArgumentSnapshot(self.world, shown)
        caller = self.interp.current_frame
        place = Place(caller) if caller is not None and trace_rules.looks_at_callers(fn) else None
        call = DeferredCall(fn, snapshots.many(args), snapshots.named(kwargs), self.world.locate(), place)
        self.world.deferred.append(call)
        if args and trace_rules.mutates_object_later(fn):
            self.world.mutated_after_graph[id(args[0])] = trace_rules.describe(fn)

    def check_shown(self) -> None:
        """Refuses to defer a call while the default dtype is not that of the step's start: tensors of that dtype are
        shown without it."""
        if torch.get_default_dtype() != self._dtype:
            self.world.heap.refuse("SFX111", "prints or logs while the step has a setting of torch changed: the dtype")

    def defer_change(self, fn: Callable[..., Any], args: tuple[Any, ...], what: str) -> None:
        """Defers ``fn(*args)``, which changes its first argument; reading that argument first breaks the graph."""
        self.defer(fn, args, {})
        self.world.mutated_after_graph[id(args[0])] = what

    def defer_for_result(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeferredResult:
        """Defers a call whose result the step may store, return or pass to other deferred calls."""
        self.defer(fn, args, kwargs)
        result = self.world.deferred[-1].result = DeferredResult()
        return result

    def freeze(self, value: Any) -> Any:
        """Returns a snapshot of a value for a deferred string."""
        self.check_shown()
        return ArgumentSnapshot(self.world, shown=True).value(value)
