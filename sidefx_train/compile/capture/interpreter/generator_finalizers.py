"""Suspended generators with a pending ``finally``, ``with`` or ``except``, which runs when they are finalized.

Eager Python runs it when the last reference to the generator is dropped. Such generators, and iterators over them, are
therefore kept and dropped in order, also across graph breaks.
"""

from __future__ import annotations

import functools
import gc
import itertools
import types
from typing import Any
from weakref import getweakrefcount

from sidefx_train.compile.capture.interpreter.dispatch import code_info
from sidefx_train.compile.capture.interpreter.frame import NULL
from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.common.library_modules import calls_back, is_library
from sidefx_train.compile.common.type_checks import deletes, safe_isinstance

_STOP_ITERATION_ERROR = 3
"""Argument of the ``CALL_INTRINSIC_1`` that ends every generator since Python 3.12."""

COMPOSED: frozenset[type] = frozenset(
    {enumerate, zip, map, filter, *(cls for cls in vars(itertools).values() if safe_isinstance(cls, type))}
)
"""C classes of iterators over other iterators."""

HOLDERS: frozenset[type] = COMPOSED | {types.GeneratorType}
"""Classes of outside iterators that may be or hold suspended generators."""


class ClosingStandIn:
    """Base class of shadows of outside iterators that run the program's code when finalized."""

    __slots__ = ()


def has_pending_finally(value: Any) -> bool:
    """Returns True if finalizing an iterator (traced or real) in its current state runs the program's code."""
    return _has_pending_finally(value, set())


def runs_code_when_freed(value: Any) -> bool:
    """Returns True for an iterator with a pending ``finally``, and for an object whose class has a ``__del__`` or to
    which weak references of the program refer: they call it, or are dead from then on.

    Libraries have weak references to tensors of their own.
    """
    if type(value) in HOLDERS:
        return has_pending_finally(value)
    if deletes(type(value)):
        return True
    return getweakrefcount(value) != 0 and (not is_library(type(value).__module__) or calls_back(value))


def _has_pending_finally(value: Any, seen: set[int]) -> bool:
    cls = type(value)
    if cls not in HOLDERS and cls is not InterpretedGenerator:
        return safe_isinstance(value, ClosingStandIn)
    if id(value) in seen:
        return False
    seen.add(id(value))
    held: Any
    if cls is InterpretedGenerator:
        frame = value.frame
        if not value.started or value.running or frame.done:
            return False
        if _handles(frame.code, frame.pc - 1):
            return True
        held = (*frame.stack, *(item for item in frame.locals if item is not NULL))
    elif cls is types.GeneratorType:
        if not value.gi_suspended:
            return False
        if _handles(value.gi_code, _index_at(value.gi_code, value.gi_frame.f_lasti)):
            return True
        held = gc.get_referents(value)
    else:
        held = gc.get_referents(value)
        # Their own tuples may contain NULL, which Python code must not read.
        held += gc.get_referents(*(item for item in held if type(item) is tuple))
    return any(_has_pending_finally(item, seen) for item in held)


@functools.lru_cache(maxsize=1024)
def _index_at(code: types.CodeType, offset: int) -> int:
    return max(i for i, instr in enumerate(code_info(code).instructions) if instr.offset <= offset)


@functools.lru_cache(maxsize=1024)
def _handles(code: types.CodeType, index: int) -> bool:
    """Returns True if a handler of the program covers the instruction, not only the one that every generator has."""
    instructions = code_info(code).instructions
    handler = instructions[index].handler
    while handler is not None:
        first = instructions[handler[0]]
        if first.name == "CLEANUP_THROW":  # handler of the ``yield from`` itself
            handler = first.handler
            continue
        return (first.name, first.arg) != ("CALL_INTRINSIC_1", _STOP_ITERATION_ERROR)
    return False
