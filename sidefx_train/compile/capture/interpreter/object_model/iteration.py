"""The iteration protocol, for interpreted code and for C code that iterates over interpreted objects."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.frame import RETURNED
from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.capture.interpreter.object_model.attributes import (
    call_special,
    is_c_level,
    is_static,
    special,
)
from sidefx_train.compile.common.sentinels import ABSENT, NATIVE_CODE
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


class SequenceIterator:
    """Iterator over an object that has only ``__getitem__``."""

    def __init__(self, interp: InterpreterAPI, obj: Any) -> None:
        self.interp = interp
        self.obj = obj
        self.index = 0

    def __iter__(self) -> SequenceIterator:
        return self

    def __next__(self) -> Any:
        if self.index < 0:
            raise StopIteration
        if self.index == sys.maxsize:
            raise OverflowError("iter index too large")
        item = self.item()
        if item is ABSENT:
            self.index, self.obj = -1, None
            raise StopIteration
        self.index += 1
        return item

    def __length_hint__(self) -> Any:
        if self.index < 0:
            return 0
        size = length_hint(self.interp, self.obj)
        return max(size - self.index, 0) if safe_isinstance(size, int) else NotImplemented

    def __reduce__(self) -> Any:
        if self.index < 0:
            return iter, ((),)
        return iter, (self.obj,), self.index

    def __setstate__(self, index: int) -> None:
        if self.index >= 0:
            self.index = max(index, 0)

    def item(self) -> Any:
        """Returns the item at the current position, :data:`ABSENT` after the last."""
        try:
            return self.interp.getitem(self.obj, self.index)
        except (IndexError, StopIteration):
            self.interp.in_flight = None
            return ABSENT


class ReversedSequence(SequenceIterator):
    """``reversed`` of an object that has only ``__len__`` and ``__getitem__``."""

    def __init__(self, interp: InterpreterAPI, obj: Any, size: int) -> None:
        super().__init__(interp, obj)
        self.index = size - 1

    def __next__(self) -> Any:
        item = self.item() if self.index >= 0 else ABSENT
        if item is ABSENT:
            self.index, self.obj = -1, None
            raise StopIteration
        self.index -= 1
        return item

    def __length_hint__(self) -> int:
        if self.index < 0:
            return 0
        size: int = self.interp.call(len, (self.obj,), {})
        return self.index + 1 if self.index < size else 0


class PythonIterator:
    """Lets C code iterate over an interpreted iterator: each step re-enters the interpreter."""

    def __init__(self, interp: InterpreterAPI, iterator: Any) -> None:
        self.interp = interp
        self.iterator = iterator

    def __iter__(self) -> PythonIterator:
        return self

    def __next__(self) -> Any:
        item = step(self.interp, self.iterator)
        if item is ABSENT:
            raise StopIteration
        return item


class PythonIterable:
    """Lets C code iterate over an object whose ``__iter__`` is interpreted."""

    def __init__(self, interp: InterpreterAPI, obj: Any) -> None:
        self.interp = interp
        self.obj = obj

    def __iter__(self) -> Any:
        iterator = get_iter(self.interp, self.obj)
        if type(iterator) in _OWN_ITERATORS or special(self.interp, iterator, "__next__") is ABSENT:
            return iterator
        return PythonIterator(self.interp, iterator)

    def __length_hint__(self) -> Any:
        size = length_hint(self.interp, self.obj)
        # C code only preallocates by it: no reason to specialize a symbolic number.
        return size if is_static(type(size)) or safe_isinstance(size, int) else 0


for _cls in (SequenceIterator, ReversedSequence, PythonIterator, PythonIterable):
    NATIVE_CODE.update(id(_fn.__code__) for _fn in vars(_cls).values() if safe_isinstance(_fn, types.FunctionType))
_OWN_ITERATORS = frozenset({InterpretedGenerator, SequenceIterator, ReversedSequence, PythonIterator})
_C_ITERATORS = frozenset(map(type, (iter([]), iter(()), iter(range(0)), iter(""))))
"""Iterators over one container without Python code: stepped without calling the world."""


def get_iter(interp: InterpreterAPI, obj: Any) -> Any:
    """``iter(obj)``."""
    kind = type(obj)
    if kind in _OWN_ITERATORS:
        return obj
    answer = interp.world.override_operator("iter", (obj,))
    return _iterator_of(interp, obj) if answer is ABSENT else answer


def try_iter(interp: InterpreterAPI, obj: Any) -> Any:
    """``iter(obj)``; returns :data:`ABSENT` if its class has no such method."""
    if type(obj) in _OWN_ITERATORS:
        return obj
    answer = interp.world.override_operator("iter", (obj,))
    if answer is not ABSENT:
        return answer
    seen = interp.type_of(obj)
    world = interp.world
    if world.class_attr(seen, "__iter__") is ABSENT and world.class_attr(seen, "__getitem__") is ABSENT:
        return ABSENT
    return _iterator_of(interp, obj)


def _iterator_of(interp: InterpreterAPI, obj: Any) -> Any:
    if not is_static(type(obj)):
        seen = interp.type_of(obj)
        method = interp.world.class_attr(seen, "__iter__")
        if method is None:
            raise TypeError(f"{seen.__name__!r} object is not iterable")
        if method is ABSENT:
            if special(interp, obj, "__getitem__") is not ABSENT:
                return SequenceIterator(interp, obj)
        elif not is_c_level(method):
            found = call_special(interp, method, obj, ())
            shown = interp.type_of(found)
            if type(found) not in _OWN_ITERATORS and interp.world.class_attr(shown, "__next__") is ABSENT:
                raise TypeError(f"iter() returned non-iterator of type {shown.__name__!r}")
            return found
    return interp.world.native_call(iter, (obj,), {})


def step(interp: InterpreterAPI, iterator: Any) -> Any:
    """Returns the next item, :data:`ABSENT` at the end."""
    kind = type(iterator)
    if kind is InterpretedGenerator:
        if iterator.advance(None) == RETURNED:
            iterator.frame.result = None
            return ABSENT
        frame = iterator.frame
        result, frame.result = frame.result, None
        return result
    if kind in _C_ITERATORS:
        return next(iterator, ABSENT)
    try:
        answer = interp.world.override_operator("next", (iterator,))
        if answer is not ABSENT:
            return answer
        if not is_static(kind) and kind not in _OWN_ITERATORS:
            method = special(interp, iterator, "__next__")
            if method is not ABSENT:
                return call_special(interp, method, iterator, ())
        return interp.world.native_call(next, (iterator,), {})
    except StopIteration:
        interp.in_flight = None
        return ABSENT


def step_or_raise(interp: InterpreterAPI, iterator: Any) -> Any:
    """``next(iterator)``."""
    kind = type(iterator)
    if kind in _OWN_ITERATORS:
        return iterator.__next__()
    answer = interp.world.override_operator("next", (iterator,))
    if answer is not ABSENT:
        return answer
    method = special(interp, iterator, "__next__")
    if method is not ABSENT:
        return call_special(interp, method, iterator, ())
    return interp.world.native_call(next, (iterator,), {})


def for_c_code(interp: InterpreterAPI, obj: Any) -> Any:
    """Returns ``obj``, or an iterator for C code if iterating ``obj`` runs Python code."""
    if type(obj) in _OWN_ITERATORS or is_static(type(obj)):
        return obj
    own = any(special(interp, obj, name) is not ABSENT for name in ("__iter__", "__len__", "__length_hint__"))
    lacks_iter = interp.world.class_attr(interp.type_of(obj), "__iter__") is ABSENT
    if lacks_iter and special(interp, obj, "__getitem__") is not ABSENT:
        own = True
    elif lacks_iter:
        return obj  # C code raises
    return PythonIterable(interp, obj) if own else obj


def length_hint(interp: InterpreterAPI, obj: Any) -> Any:
    """Returns the length hint of ``obj`` for C code that preallocates its items."""
    for name in ("__len__", "__length_hint__"):
        method = special(interp, obj, name)
        if method is not ABSENT and method is not None:
            try:
                return call_special(interp, method, obj, ())
            except TypeError:
                interp.in_flight = None
                return NotImplemented
    return NotImplemented


def to_list(interp: InterpreterAPI, obj: Any, hinted: bool = False) -> list[Any]:
    """Returns a new list of all items; ``hinted`` if C code would read the length first."""
    iterator = get_iter(interp, obj)
    if hinted and not is_static(type(obj)) and type(obj) not in _OWN_ITERATORS:
        length_hint(interp, obj)
    items: list[Any] = []
    while True:
        item = step(interp, iterator)
        if item is ABSENT:
            return items
        items.append(item)
