"""Keys of outside dicts and sets, and identities that C code compares."""

from __future__ import annotations

import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.containers.traversal import attributes_of, held_by
from sidefx_train.compile.capture.shadows.records import InstanceRecord
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.native_call_facts import compares_in_python
from sidefx_train.compile.capture.world.native_calls.dunder_reentry import COMPARING, MethodCode
from sidefx_train.compile.capture.world.symbolic_numbers import concrete_numbers
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
        self._comparisons: dict[tuple[type, bool], MethodCode] = {}

    def as_key(self, key: Any) -> Any:
        if type(key) not in PLAIN_TYPES:
            self.heap.identities.note_hashed(key)
            self.hashed(key)
        return concrete_numbers.concrete(key)

    def hashed(self, key: Any, seen: tuple[Any, ...] = ()) -> None:
        """Prepares a key of a dict or set of the step, which C code and this library's own code hash and compare.

        Raises:
            Unsupported: a method of the program, called for that, does more than read the key.
        """
        cls = type(key)
        if cls in PLAIN_TYPES or cls in compat.SYMBOLS:
            return
        if issubclass(cls, tuple) and not compares_in_python(cls):
            for item in tuple.__iter__(key):
                self.hashed(item, seen)
            return
        if issubclass(cls, weakref.ReferenceType):
            self.hashed(key(), seen)
        if cls.__hash__ is None or not compares_in_python(cls) or issubclass(cls, torch.Tensor):
            return
        comparison = self._comparison(cls, of_program=True)
        self.world.touch(key, asked="hash")
        concrete_numbers.settle(key, frozenset(comparison.attributes))
        if any(each is key for each in seen):
            return
        for name, value in attributes_of(key).items():
            if name in comparison.attributes:
                self.hashed(value, (*seen, key))

    def hashes_quietly(self, key: Any) -> bool:
        """Returns True if the key may be hashed and compared once more, after the step: nobody sees that."""
        cls = type(key)
        if issubclass(cls, tuple):
            return all(map(self.hashes_quietly, tuple.__iter__(key)))
        if cls in PLAIN_TYPES or not compares_in_python(cls) or issubclass(cls, torch.Tensor):
            return True
        return MethodCode(cls, COMPARING).only_looks

    def _comparison(self, cls: type, of_program: bool) -> MethodCode:
        """Examines the methods by which C code is about to hash and compare instances of a class, and guards them.

        Those of a key of the step may change lists and dicts that it refers to, shadows too, unless it leaves the step.

        Raises:
            Unsupported: one does more than read its operands.
        """
        found = self._comparisons.get((cls, of_program))
        if found is not None:
            return found
        found = MethodCode(cls, COMPARING, of_program)
        if not (found.only_looks or (of_program and found.stays_inside)):
            reason = f"uses a {cls.__qualname__} as a key, whose __hash__ or __eq__ does more than read it"
            self.heap.refuse("SFX111", reason)
        if id(cls) not in self.world.new_classes:
            self.compares_by(cls)
            for fn in found.functions.values():
                if id(fn) not in self.world.new_functions:
                    self.heap.definitions.runs(fn)
            for space, name in found.read_globals:
                if self.world.variables.load_global(space, name) is not space.get(name):
                    self.heap.refuse("SFX111", f"uses a {cls.__qualname__} as a key, whose methods read {name}")
        self._comparisons[cls, of_program] = found
        return found

    def own_key(self, key: Any, pin: bool = True) -> Any:
        """Prepares a key of an outside dict or set for hashing and comparison by the table's own bookkeeping.

        Args:
            key: the key.
            pin: the step depends on whether the key exists, so its identity is guarded.
        """
        key = concrete_numbers.concrete(key)
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
        self._comparison(cls, of_program=False)
        self.world.touch(key, asked="hash")
        concrete_numbers.settle(key)
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
