"""Keys of outside dicts and sets, and identities that C code compares."""

from __future__ import annotations

import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.shadows.containers.traversal import held_by
from sidefx_train.compile.capture.shadows.records import InstanceRecord
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.native_call_facts import (
    compares_in_python,
)
from sidefx_train.compile.capture.world.native_calls import (
    builtin_methods,
)
from sidefx_train.compile.capture.world.native_calls.dunder_reentry import only_looks
from sidefx_train.compile.common.library_modules import is_library, is_standard
from sidefx_train.compile.common.plain_values import PLAIN_TYPES
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.frame import Frame


class Keys:
    """Hashes and compares keys as the step would, and records which identities matter."""

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.heap, self.interp, self.tracer = world.heap, world.interp, world.tracer

    def as_key(self, key: Any) -> Any:
        if type(key) not in PLAIN_TYPES:
            self.heap.identities.note_hashed(key)
        return builtin_methods.concrete(key)

    def own_key(self, key: Any, pin: bool = True) -> Any:
        """Prepares a key of an outside dict or set for hashing and comparison by the table's own bookkeeping.

        Args:
            key: the key.
            pin: the step depends on whether the key exists, so its identity is guarded.
        """
        key = builtin_methods.concrete(key)
        cls = type(key)
        if cls in PLAIN_TYPES:
            return key
        if cls is tuple:
            return tuple(self.own_key(item, pin) for item in key)
        self.heap.identities.note_hashed(key)
        if pin:
            self.heap.identities.pin_key(key)
        if safe_isinstance(key, weakref.ReferenceType):
            self.own_key(key(), pin)  # its hash and equality are those of its referent
        if not compares_in_python(cls) or issubclass(cls, torch.Tensor):
            return key
        self.compares_by(cls)
        if not only_looks(cls):
            reason = f"uses a {cls.__qualname__} as an outside key, whose __hash__ or __eq__ does more than read it"
            self.heap.refuse("SFX111", reason)
        self.world.touch(key, asked="hash")
        builtin_methods.settle(key)
        return key

    def compares_by(self, cls: type) -> None:
        """Guards the methods by which C code is about to hash and compare instances of a class."""
        for name in ("__hash__", "__eq__"):
            method = self.interp.world.class_attr(cls, name)
            if safe_isinstance(method, types.FunctionType):
                self.heap.definitions.runs(method)

    def guard_distinct(self, values: list[Any]) -> None:
        """Records that C code is about to compare objects, most of them by identity."""
        found, todo, seen = [], values, set()
        while todo:
            value = todo.pop()
            if type(value) in PLAIN_TYPES or id(value) in seen:
                continue
            seen.add(id(value))
            todo += held_by(value)
            if type(value) is types.MethodType:
                todo.append(value.__self__)
            elif safe_isinstance(value, weakref.ReferenceType):
                todo.append(value())
            if safe_isinstance(self.heap.record_of(value), InstanceRecord):
                found.append(value)
        if len(found) > 1:
            for value in found:
                self.heap.identities.note_distinguished(value)

    def address(self, value: Any, frame: Frame | None) -> int:
        """Returns ``id(value)`` of the outside object, guarded if the program may keep the number.

        The standard library (``copy``, say) only distinguishes objects, and a library keeps no address of an argument.
        """
        record = self.heap.record_of(value)
        if record is None:
            self.heap.identities.note_hashed(value)
            return id(value)
        name = str(frame.globals.get("__name__", "")) if frame is not None else ""
        if is_standard(name) or (is_library(name) and record.base.from_arguments):
            self.heap.identities.note_hashed(value)
        else:
            self.heap.guard("is", record.base, record.real)
        return id(record.real)
