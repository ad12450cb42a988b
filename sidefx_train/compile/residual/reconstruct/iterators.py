"""Rebuilds iterators and suspended generators at their position."""

from __future__ import annotations

from typing import Any

from sidefx_train.compile.capture.guards.guard import same_value
from sidefx_train.compile.capture.guards.source import stored_keys
from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.capture.interpreter.object_model.iteration import PythonIterable, PythonIterator
from sidefx_train.compile.capture.resume.native_generators import hand_out, resume
from sidefx_train.compile.capture.shadows.containers.iterators import (
    VIEWS,
    iterated_container,
    iteration_is_invalid,
    left_over,
    walk,
)
from sidefx_train.compile.common.plain_values import is_plain
from sidefx_train.compile.common.positioned_iterators import is_reducible
from sidefx_train.compile.common.thread_warnings import no_warnings
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.residual.reconstruct.reconstruction import Reconstruction


def iterator(rebuilder: Reconstruction, value: Any) -> str:
    """Returns a C iterator over its containers, at its position."""
    if type(value) in VIEWS:
        return rebuilder.remember(value, _walk(rebuilder, value))
    if not is_reducible(type(value)):
        rebuilder.refuse("SFX111", f"this Python cannot copy an itertools.{type(value).__name__} at its position")
    with no_warnings():  # of itertools, since Python 3.12
        made, arguments, *state = value.__reduce__()
    with rebuilder.reading():
        parts = ", ".join(rebuilder.expression(part) for part in arguments)
    expression = rebuilder.remember(value, f"{rebuilder.constant(made)}({parts})")
    if state and state[0] is not None:
        rebuilder.write(f"{expression}.__setstate__({rebuilder.expression(state[0])})")
    return expression


def _walk(rebuilder: Reconstruction, iterator: Any) -> str:
    """Returns an iterator over a real dict or set, which detects later changes of its size."""
    view = rebuilder.constant(VIEWS[type(iterator)], "view")
    container, left = iterated_container(iterator), left_over(iterator)
    if left is None:
        return f"{rebuilder.constant(iteration_is_invalid)}({view})"
    ended = container is None
    container = {} if ended else container
    if safe_isinstance(container, (set, frozenset)) and len(container) > 1 and not _in_its_order(rebuilder, container):
        rebuilder.refuse("SFX111", "cannot rebuild an iterator over a set whose order depends on its history")
    record = rebuilder.world.heap.record_of(container)
    if record is not None and not _in_its_order(rebuilder, container):
        rebuilder.apply(record)
    with rebuilder.reading():
        made = "{}" if ended else rebuilder.expression(container)
    return f"{rebuilder.constant(walk)}({view}, {made}, {len(container) - left})"


def _in_its_order(rebuilder: Reconstruction, container: Any) -> bool:
    """Returns True if the real container has the keys of the shadow, in their order."""
    record = rebuilder.world.heap.record_of(container)
    outside = list(stored_keys(container if record is None else record.real))
    inside = [rebuilder.world.heap.real_key(key) for key in stored_keys(container)]
    if record is None:
        return not safe_isinstance(container, (set, frozenset)) or all(map(is_plain, inside))
    pairs = zip(inside, outside, strict=False)
    return len(inside) == len(outside) and all(a is b or (is_plain(a) and same_value(a, b)) for a, b in pairs)


def generator(rebuilder: Reconstruction, value: InterpretedGenerator) -> str:
    """Returns a suspended generator, which continues natively."""
    code, state = hand_out(value)
    with rebuilder.reading():
        parts = [
            rebuilder.constant(resume),
            rebuilder.constant(code, "code"),
            rebuilder.constant(value.frame.globals, "globals"),
            rebuilder.constant(value.__name__),
            rebuilder.constant(value.__qualname__),
            rebuilder.constant(value.started),
            rebuilder.expression(state),
        ]
        return rebuilder.remember(value, f"{parts[0]}({', '.join(parts[1:])})")


def python_iterable(rebuilder: Reconstruction, value: PythonIterable) -> str:
    return rebuilder.expression(value.obj)


def python_iterator(rebuilder: Reconstruction, value: PythonIterator) -> str:
    return rebuilder.expression(value.iterator)
