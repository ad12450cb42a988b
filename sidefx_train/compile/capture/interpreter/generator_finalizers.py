"""Suspended generators that run code of their own when they die: a ``finally``, a ``with``, an ``except``.

Eager Python runs it as soon as the last reference to the generator is gone, so such generators, and iterators over
them, are kept and dropped in their turn, also by what is captured in parts.
"""

from __future__ import annotations

import functools
import gc
import itertools
import types
from typing import Any

from sidefx_train.compile.capture.interpreter.dispatch import code_info
from sidefx_train.compile.capture.interpreter.frame import NULL
from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.common.type_checks import safe_isinstance

_STOP_ITERATION_ERROR = 3
"""Argument of the ``CALL_INTRINSIC_1`` that ends every generator from Python 3.12 on."""

COMPOSED: frozenset[type] = frozenset(
    {enumerate, zip, map, filter, *(cls for cls in vars(itertools).values() if safe_isinstance(cls, type))}
)
"""Classes of C of iterators that walk over others."""

HOLDERS: frozenset[type] = COMPOSED | {types.GeneratorType}
"""Classes of outside iterators that may be suspended generators or hold some."""


class ClosingStandIn:
    """Base of what stands for an outside iterator that cleans up when it dies."""

    __slots__ = ()


def has_pending_finally(value: Any) -> bool:
    """True if the program's code runs when an iterator, of the trace or real, dies where it is now."""
    return _has_pending_finally(value, set())


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
        # Their own tuples may have empty places, which Python code must not read.
        held += gc.get_referents(*(item for item in held if type(item) is tuple))
    return any(_has_pending_finally(item, seen) for item in held)


@functools.lru_cache(maxsize=1024)
def _index_at(code: types.CodeType, offset: int) -> int:
    return max(i for i, instr in enumerate(code_info(code).instructions) if instr.offset <= offset)


@functools.lru_cache(maxsize=1024)
def _handles(code: types.CodeType, index: int) -> bool:
    """True if a handler that was written covers the instruction, not just one that every generator has."""
    instructions = code_info(code).instructions
    handler = instructions[index].handler
    while handler is not None:
        first = instructions[handler[0]]
        if first.name == "CLEANUP_THROW":  # of the ``yield from`` itself
            handler = first.handler
            continue
        return (first.name, first.arg) != ("CALL_INTRINSIC_1", _STOP_ITERATION_ERROR)
    return False
