"""Calls that are replayed after the graph, with their arguments as they are now."""

from __future__ import annotations

import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sidefx_train.compile.capture.interpreter.frame_objects import Place
from sidefx_train.compile.capture.shadows.deferred_values import DeferredCall, DeferredResult
from sidefx_train.compile.capture.world.deferred.argument_snapshot import ArgumentSnapshot
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.type_checks import safe_isinstance


class Deferral:
    """Records calls that only show or record something; the epilogue replays them."""

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.heap, self.interp, self.tracer = world.heap, world.interp, world.tracer
        self._dtype = torch.get_default_dtype()

    def defer(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Defers a call until after the graph, with a snapshot of its arguments."""
        shown = trace_rules.shows_text(fn)
        snapshots = ArgumentSnapshot(self.world, shown, printed=fn is print)
        caller = self.interp.current_frame
        place = Place(caller) if caller is not None and trace_rules.looks_at_callers(fn) else None
        call = DeferredCall(
            fn, snapshots.many(args), snapshots.named(kwargs), self.world.locate(), place, dtype=self.changed_dtype()
        )
        self.world.deferred.append(call)
        if args and trace_rules.mutates_object_later(fn):
            self.world.mutated_after_graph[id(args[0])] = trace_rules.describe(fn)

    def changed_dtype(self) -> torch.dtype | None:
        """Returns the default dtype unless it is that of the step's start."""
        now = torch.get_default_dtype()
        return now if now != self._dtype else None

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
        return ArgumentSnapshot(self.world, shown=True).value(value)


def own_code(logger: logging.Logger | None) -> str | None:
    """Returns the name of a handler, filter, formatter, stream or function of the program that a call runs; ``None`` if
    libraries do all of it.

    Such code may read what a step changes before or after the call.

    Args:
        logger: a logger that is given a record; ``None`` for a warning.
    """
    return _first_own(_parts(logger) if logger is not None else _parts_of_warnings())


def own_stream(stream: Any) -> str | None:
    """Returns the name of the program's own class whose ``write`` runs when a stream is written to; ``None`` if
    libraries do all of it.

    Args:
        stream: an object with a ``write``, or the name of one in ``sys``.
    """
    return _first_own(_layers(getattr(sys, stream, None) if type(stream) is str else stream))


def _first_own(parts: Iterator[Any]) -> str | None:
    for part in parts:
        function = safe_isinstance(part, (types.FunctionType, types.MethodType))
        kind = part if function or safe_isinstance(part, type) else type(part)
        if not is_library(str(kind.__module__)):
            return str(kind.__qualname__)
    return None


def _parts_of_warnings() -> Iterator[Any]:
    """Yields what takes part in showing a warning."""
    yield warnings.showwarning
    if getattr(warnings.showwarning, "__module__", None) == "logging":  # by `logging.captureWarnings`
        yield from _parts(logging.getLogger("py.warnings"))
    yield warnings.formatwarning
    yield from _layers(sys.stderr)


def _parts(logger: logging.Logger) -> Iterator[Any]:
    """Yields what takes part in handling a record of a logger."""
    yield logger
    yield logging.getLogRecordFactory()
    yield from logger.filters
    current: logging.Logger | None = logger
    handlers: list[logging.Handler] = []
    while current is not None:
        handlers += current.handlers
        current = current.parent if current.propagate else None
    for handler in handlers or filter(None, [logging.lastResort]):
        yield handler
        yield from handler.filters
        if handler.formatter is not None:
            yield handler.formatter
        yield from _layers(getattr(handler, "stream", None))


def _layers(stream: Any) -> Iterator[Any]:
    """Yields a stream and the streams that it writes to."""
    while stream is not None:
        yield stream
        if not is_library(str(type(stream).__module__)):
            return
        stream = next(filter(None, (getattr(stream, name, None) for name in ("buffer", "raw", "stream"))), None)
