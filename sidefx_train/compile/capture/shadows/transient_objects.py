"""Transient objects: outside objects that a program recreates at every call, guarded by structure.

Functions, partials and weak references pass through a capture, guarded by identity. Those created before a break in the
same step, or passed as an argument, differ at every call: a closure over the step's own variables, a ``lambda``
argument. Such a function is guarded by its code, globals and cell contents.
"""

from __future__ import annotations

import contextvars
import datetime
import enum
import hashlib
import re
import types
from typing import TYPE_CHECKING

import torch

from sidefx_train.compile.capture.shadows.records import Attributes, InstanceRecord, Record
from sidefx_train.compile.common.plain_values import DEFINITIONS
from sidefx_train.compile.common.type_checks import descriptor_of

if TYPE_CHECKING:
    from sidefx_train.compile.capture.guards.source import Source
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


def is_transient(heap: ShadowTableAPI, real: object, source: Source) -> bool:
    """Returns True if the object under a path is expected to be another at the next call."""
    if source.kind == "const":
        return False
    if source.label in heap.specialization.refetched:
        return True
    own = type(real) is not types.FunctionType or "<locals>" in real.__qualname__
    return heap.is_part and source.from_arguments and own


def same_structure(old: object, new: object) -> bool:
    """Returns True if one object replaced another of the same structure."""
    if type(old) is types.FunctionType and type(new) is types.FunctionType:
        return old.__code__ is new.__code__ and old.__globals__ is new.__globals__
    if type(old) is types.BuiltinMethodType and type(new) is types.BuiltinMethodType:
        method = descriptor_of(old)
        return method is not None and descriptor_of(new) is method and type(old.__self__) is type(new.__self__)
    return type(old) is type(new) and not isinstance(old, _ITSELF)


_ITSELF = (
    *DEFINITIONS,
    types.BuiltinMethodType,
    types.CodeType,
    enum.Enum,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.Generator,
    torch.dtype,
    torch.layout,
    torch.memory_format,
)
"""Objects that a step is captured for: another one makes another step."""


_OF_HASH = ("name", "digest_size", "block_size")
HANDLES: dict[type, tuple[str, ...]] = {
    contextvars.Token: (),
    **{type(make()): _OF_HASH for make in (hashlib.sha256, hashlib.shake_128, hashlib.blake2b, hashlib.blake2s)},
}
"""C classes of objects that are created at every call, and that C code only gets where it runs natively, with the names
of attributes that are guarded."""


def is_value(real: object) -> bool:
    """Returns True for a C object that is interchangeable with any equal one."""
    if type(real) in (datetime.datetime, datetime.time):
        return real.tzinfo is None and not real.fold  # type: ignore[attr-defined]
    return type(real) in (datetime.date, datetime.timedelta, re.Pattern)


def function(heap: ShadowTableAPI, real: types.FunctionType, source: Source) -> Record:
    """Returns the record of a pass-through function: everything it refers to is reached by its path."""
    sources = heap.sources
    heap.guard("type", source, types.FunctionType)
    for name in ("__code__", "__globals__"):
        heap.guard("is", sources.slot(source, name), getattr(real, name))
    record = Record(heap, real, real, source, source)
    record.instance = InstanceRecord(heap, real, Attributes(), source, source)
    heap.register(record)  # before its cells, which may refer to it
    for name in ("__defaults__", "__kwdefaults__"):
        heap.shadow(getattr(real, name), sources.slot(source, name))
    closure = sources.slot(source, "__closure__")
    for index, cell in enumerate(real.__closure__ or ()):
        heap.shadow(cell, sources.item(closure, index, f"{source.label}.{real.__code__.co_freevars[index]}"))
    return record
