"""Operators in the capturing world: on tensors, symbolic numbers, deferred text and shadows."""

from __future__ import annotations

import functools
import json
import math
import operator
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.object_model import operators
from sidefx_train.compile.capture.interpreter.object_model.attributes import is_static
from sidefx_train.compile.capture.recording import symbolic_indexing
from sidefx_train.compile.capture.shadows.containers.iterators import NativeIterator
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord, ListRecord
from sidefx_train.compile.capture.shadows.deferred_values import (
    TEXT_METHODS,
    DeferredArray,
    DeferredValue,
    LimitedShadow,
    PassedItem,
    join_text,
    percent,
)
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.capture.shadows.objects.sparse_matrices import SparseMatrix
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.capture.world.deferred.argument_snapshot import deferred_string
from sidefx_train.compile.capture.world.deferred.deferred_strings import as_shown, deferred_in
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.native_call_facts import HASHED, joins, joins_items
from sidefx_train.compile.capture.world.native_calls import builtin_methods
from sidefx_train.compile.capture.world.symbolic_numbers import (
    concrete_numbers,
    graph_functions,
    number_calls,
    number_subclasses,
)
from sidefx_train.compile.capture.world.symbolic_numbers.domain_errors import needs_values, operator_raises
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.plain_values import CONTAINERS
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

_SUBSCRIPTS = frozenset({"getitem", "setitem", "delitem"})
_OF_ARRAYS = frozenset(
    {
        "getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor",
        "lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "invert",
    }
)  # fmt: skip
"""Operators that compute a new array, or a view or number of one."""

_MOST_ITERATED = 64
"""Limit of items of a drawn array that a loop takes; each is an input of the graph."""


class Operators:
    """Answers operators that CPython's own code would compute from values the capture does not have."""

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.heap, self.interp, self.tracer = world.heap, world.interp, world.tracer

    def override_operator(self, name: str, args: tuple[Any, ...]) -> Any:
        first = args[0] if args else None
        if name in _SUBSCRIPTS and safe_isinstance(first, _INDEXED_IN_C):
            index = symbolic_indexing.decided(args[1])
            if index is not args[1]:
                return self.interp.call(builtin_methods.OPERATORS[name], (first, index, *args[2:]), {})
        if name in _SUBSCRIPTS and safe_isinstance(first, (torch.Tensor, np.ndarray)):
            index = operators.positions(self.interp, args[1])
            if index is not args[1]:
                return self.interp.call(builtin_methods.OPERATORS[name], (first, index, *args[2:]), {})
            if safe_isinstance(first, torch.Tensor):
                index = self.world.deferred_arrays.as_index(args[1])
                if index is not args[1]:
                    return self.interp.call(builtin_methods.OPERATORS[name], (first, index, *args[2:]), {})
            if safe_isinstance(first, np.ndarray):
                computed = self._of_drawn(name, args)
                return self._of_array(name, args) if computed is ABSENT else computed
        if self.world.reads.listening:
            self.world.reads.containers(args)
        if safe_isinstance(first, NativeIterator) and name in ("iter", "next"):
            return first if name == "iter" else first.__next__()
        limited = [each for each in (args[:2] if name == "setitem" else args) if issubclass(type(each), LimitedShadow)]
        if limited:  # any value may be stored
            answer = self._of_limited(name, args, limited)
            if answer is not ABSENT:
                return answer
        if name in _TEXT:
            return self._text(name, args)
        if name == "mod" and safe_isinstance(first, str):
            found = self._percent(first, args[1])
            if found is not ABSENT:
                return found
        if name == "is_":
            kinds = {self.interp.type_of(value) for value in args} if any(map(_is_deferred, args)) else set()
            if len(kinds) == 1 and args[0] is not args[1]:  # Python may use one object for equal values
                self.heap.refuse("SFX106", "compares the identity of a value that is known only after the step")
            self.heap.identities.guard_distinct(*args)
            return number_calls.one_object(*args)
        if name in ("add", "iadd") and all(type(value) is str or _is_text(value) for value in args):
            return deferred_string(self.world, operator.add, args) if any(map(_is_text, args)) else ABSENT
        for value in args[:2] if name == "setitem" else args:  # any value may be stored
            if issubclass(type(value), DeferredValue):
                if name == "getitem" and value is not first and _decides(first, name):
                    return ABSENT  # its own method gets the value
                if name == "iter" and type(first) is DeferredArray:
                    made = self.world.deferred_arrays.items(first)
                    if made is not ABSENT:
                        return made
                if any(type(each) is DeferredArray for each in args):
                    made = self.world.deferred_arrays.operator(name, args)
                    if made is not ABSENT:
                        return made
                if name == "getitem" and safe_isinstance(first, dict) and type(value) is DeferredValue:
                    key = self.world.computed_objects.name_of_module(first, value)
                    if key is not ABSENT:
                        return self.interp.getitem(first, key)
                function = builtin_methods.OPERATORS.get(name)
                found = ABSENT if function is None else self.world.computed_objects.call(function, args, {})
                if found is not ABSENT:
                    return found
                self.heap.refuse("SFX106", f"computes {name} of a value that is known only after the step")
        if name in _SUBSCRIPTS and safe_isinstance(first, dict) and not _decides(first, name):
            key = concrete_numbers.concrete_within(args[1])
            if key is not args[1]:
                return self.interp.call(builtin_methods.OPERATORS[name], (first, key, *args[2:]), {})
        if name == "contains" and type(args[1]) is torch.SymBool:
            return operators.contains(self.interp, first, concrete_numbers.concrete(args[1]))
        if name == "contains" and type(args[1]) is torch.SymInt:
            found = number_calls.among(self.world, first, args[1])
            if found is not ABSENT:
                return found
        if id(first) in self.world.module_namespaces and name in ("getitem", "setitem", "delitem", "contains"):
            return builtin_methods.namespace_operator(self.world, name, args)
        if id(first) in self.world.class_views and name in ("getitem", "contains"):
            return builtin_methods.class_view_operator(self.world, name, args)
        record = self.heap.by_shadow.get(id(first))
        if (
            name == "getitem"
            and safe_isinstance(record, ListRecord)
            and record.shadow is first
            and type(args[1]) in (int, torch.SymInt)
        ):
            item = record.at(args[1]) if type(args[1]) is int else record.at_changing(args[1])
            if item is not ABSENT:
                return item
        if (
            name == "setitem"
            and safe_isinstance(record, ListRecord)
            and record.shadow is first
            and type(args[1]) in (int, torch.SymInt)
            and record.place_at(args[1], args[2])
        ):
            return None
        if (
            name == "delitem"
            and safe_isinstance(record, ListRecord)
            and record.shadow is first
            and type(args[1]) in (int, torch.SymInt)
            and record.remove(args[1])
        ):
            return None
        if name == "iadd" and _extends(record, args):
            args[0].extend(self.interp.iterate(args[1]))
            return first
        if name == "getitem" and safe_isinstance(record, ListRecord) and type(args[1]) is slice:
            part = record.part(args[1])
            if part is not ABSENT:
                return part
        if safe_isinstance(record, DictRecord) and record.shadow is first and record.plain:
            return builtin_methods.dict_operator(self.world, record, name, args)
        if self.heap.definitions.operator_replaced(name) and any(type(value) is compat.FakeTensor for value in args):
            return ABSENT
        if name == "contains" and type(first) is compat.FakeTensor:
            found = registry.INTERCEPTORS[torch.Tensor.__contains__](self.world, args, {})
            if found is not ABSENT:
                return found
        computed = self._of_drawn(name, args)
        if computed is not ABSENT:
            return computed
        if name == "invert" and type(args[0]) is torch.SymInt:  # torch has none
            return -args[0] - 1
        traced = any(type(value) in _TRACED for value in args)
        if traced and name in _OF_NUMBERS and any(map(_is_truth, args)):
            args = self._with_integers(name, args)
        if name in _ORDERS_NUMBERS and _with_nan(args):  # sympy refuses it
            return name == "ne"
        if (
            traced
            and name in builtin_methods.OPERATORS
            and not self.world.functions.operator(name, args[:2])
            and not any(_decides(value, name) for value in args[:2])
            and not number_subclasses.decides(self.world, name, args)
        ):
            if name in ("getitem", "setitem") and safe_isinstance(first, torch.Tensor):
                args = (first, self._as_index(args[1]), *args[2:])
            self._touch_operands(name, args)
            self.world.calls.reads.refuse_unshadowed(builtin_methods.OPERATORS[name], args)
            if name in ("getitem", "setitem") and safe_isinstance(first, torch.Tensor):
                args = (first, self._numbers_of(args[1]), *args[2:])
                run, clamp = self.world.calls.run_native, self._clamp if name == "getitem" else None
                view = symbolic_indexing.view_of(first, args[1], run, self.world.grant, clamp)
                if view is ABSENT:
                    self._refuse_unknown_index(args[1])
                if view is not ABSENT:
                    return (
                        view
                        if name == "getitem"
                        else self.world.calls.run_native(builtin_methods.OPERATORS[name], (view, ..., args[2]), {})
                    )
            by_value = (name not in _SUBSCRIPTS and number_subclasses.needs_value(args)) or (
                any(type(value) is torch.SymBool for value in args)
                and (name in _COMPARES or (name in _BITWISE and not all(map(_is_truth, args))))
            )
            by_value = by_value or (name in _OF_NUMBERS and _with_infinity(name, args))
            by_value = by_value or operator_raises(self.world, name, args) or needs_values(self.world, name, args)
            taken_from = name in ("getitem", "setitem") and safe_isinstance(first, (list, tuple, deque))
            if not by_value and not taken_from:
                made = self.world.calls.run_native(builtin_methods.OPERATORS[name], args, {})
                by_value = name in _OF_NUMBERS and compat.forgets_symbol(args, made)
                if not by_value:
                    return made
            if by_value:
                found = self.world.computed_numbers.call(builtin_methods.OPERATORS[name], args, {})
                if found is ABSENT:
                    found = graph_functions.call(self.world, builtin_methods.OPERATORS[name], args, {})
                if found is not ABSENT:
                    return found
                args = concrete_numbers.concrete_within(args)
            if not taken_from:
                return self.world.calls.run_native(builtin_methods.OPERATORS[name], args, {})
        stores = name == "setitem" and type(first) in CONTAINERS
        for value in args[:2] if stores else args:
            array = self.heap.by_shadow.get(id(value))
            if safe_isinstance(array, ArrayRecord) and array.shadow is value:
                array.operate(name if value is first else "")
        if name in _SHALLOW:
            self.world.touch(first, deep=False, asked=name)
        else:
            self._touch_operands(name, args)
        if name in ("getitem", "setitem", "delitem") and type(first) in (list, tuple, deque):
            if name == "setitem" and type(args[1]) is slice:
                self.world.touch(args[2], deep=False)
            return self.world.guarded(
                builtin_methods.OPERATORS[name], (first, concrete_numbers.concrete(args[1]), *args[2:]), {}
            )
        if name == "next" and record is not None and record.shadow is record.real:
            self.heap.refuse("SFX103", f"advances the outside iterator {record.source.label}")
        return ABSENT

    def _of_drawn(self, name: str, args: tuple[Any, ...]) -> Any:
        """Returns what an operator computes of a drawn array; ``ABSENT`` for other operands."""
        if name == "iter" and type(args[0]) is np.ndarray and self.world.random_draws.is_drawn(args[0]):
            length = self.interp.call(len, (args[0],), {})
            if not 0 < length <= _MOST_ITERATED:
                return ABSENT
            return iter([self.interp.getitem(args[0], place) for place in range(length)])
        if name == "setitem" or (name.startswith("i") and name[1:] in _OF_ARRAYS):
            drawn = type(args[0]) is np.ndarray and self.world.random_draws.is_drawn(args[0])
            if drawn and self.world.random_draws.write(builtin_methods.OPERATORS[name], args):
                return None if name == "setitem" else args[0]
            return ABSENT
        if name not in _OF_ARRAYS or (name == "getitem" and not self.world.random_draws.is_drawn(args)):
            return ABSENT
        return self.world.random_draws.derived(builtin_methods.OPERATORS[name], args, {})

    def _of_array(self, name: str, args: tuple[Any, ...]) -> Any:
        """Reads or writes elements of an array; the prologue looks them up at an index that changes."""
        record = self.heap.by_shadow.get(id(args[0]))
        if safe_isinstance(record, ArrayRecord) and record.shadow is args[0]:
            record.operate(name)
        self._touch_operands(name, args)
        if name != "getitem":
            return ABSENT
        found = (
            self.world.computed_numbers.call(operator.getitem, args, {}) if type(args[1]) is torch.SymInt else ABSENT
        )
        return self.world.random_draws.at_changing(*args) if found is ABSENT else found

    def _as_index(self, index: Any) -> Any:
        """Returns a tensor for an array or a list of changing numbers that is an index, or part of one; else the index
        itself."""
        if type(index) is tuple:
            return tuple(map(self._as_index, index))
        if type(index) is list and any(type(each) is torch.SymInt for each in index):
            numbers = all(type(each) is int or type(each) is torch.SymInt for each in index)
            return self.interp.call(torch.tensor, (index,), {}) if numbers else index
        if type(index) is np.ndarray:
            index = self.world.random_draws.copied(index)
        array = self.heap.record_of(index)
        if not safe_isinstance(array, ArrayRecord) or array.real.dtype != np.int64 or array.real.ndim != 1:
            return index
        return array.as_tensor() if array.real.flags.c_contiguous and array.real.size else index

    def _numbers_of(self, index: Any) -> Any:
        """Returns an index with numbers in place of 0-dim tensors of integers, which C++ code takes for integers."""
        parts = index if type(index) is tuple else (index,)
        if any(map(_has_bound, parts)):
            parts = tuple(self._bounds_of(part) if _has_bound(part) else part for part in parts)
            index = parts if type(index) is tuple else parts[0]
        if not any(map(_is_place, parts)) or not all(
            _is_place(part) or type(part) in symbolic_indexing.PLAIN for part in parts
        ):
            return index
        numbers = tuple(
            number_calls.convert_number(self.world, int, (part,)) if _is_place(part) else part for part in parts
        )
        return numbers if type(index) is tuple else numbers[0]

    def _bounds_of(self, part: slice) -> slice:
        bounds = (part.start, part.stop, part.step)
        return slice(
            *(number_calls.convert_number(self.world, int, (bound,)) if _is_place(bound) else bound for bound in bounds)
        )

    def _with_integers(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns operands with integers in place of truth values: of those that are inputs, unless the operator or a
        tensor knows truth values, and of constants beside a changing number, as sympy's are no numbers."""
        tensors = [value for value in args if type(value) is compat.FakeTensor]
        if name not in (_REFUSE_TRUTHS if tensors else _OF_BITS) and all(t.dtype is not torch.bool for t in tensors):
            args = tuple(map(self.heap.numbers.number_of, args))
        if not any(type(value) in _CHANGING for value in args):
            return args
        return tuple(int(value) if type(value) is bool else value for value in args)

    def _touch_operands(self, name: str, args: tuple[Any, ...]) -> None:
        if name in _UNIONS and type(args[0]) is dict:
            self.world.calls.reads.touch_entries(args, name)
            return
        keyed, joins = name == "contains" and type(args[0]) in HASHED, joins_items(name, args)
        for i, value in enumerate(args):
            self.world.touch(value, deep=not joins and (i > 0 or not keyed), asked=name)

    def _of_limited(self, name: str, args: tuple[Any, ...], limited: list[LimitedShadow]) -> Any:
        """Answers an operator of shadows of which little is captured: a product, or identity; refuses others."""
        if name == "matmul" and type(args[0]) is SparseMatrix:
            return registry.INTERCEPTORS[torch.matmul](self.world, args, {})
        if name == "is_":
            if args[0] is args[1]:
                return True
            limited = [each for each in limited if type(each) is PassedItem]  # others are known objects
        if limited:
            limited[0].refuse(self.heap)
        return ABSENT

    @property
    def _clamp(self) -> Any:
        """The function that clamps bounds of slices; ``None`` where they stay as they are, or end a part."""
        is_wanted = self.world.specialization.clamps_slices
        return functools.partial(graph_functions.slice_place, self.world) if is_wanted else None

    def _refuse_unknown_index(self, index: Any) -> None:
        for part in index if safe_isinstance(index, tuple) else (index,):
            split = type(part) is slice and self.world.specialization.splits_slices
            numbers = [each for each in ((part.start, part.stop) if split else (part,)) if type(each) is torch.SymInt]
            if any(map(compat.is_unbacked, numbers)):
                self.world.random_draws.of_torch.want(numbers)
                self.world.host_reads.want(())
                self.heap.refuse("SFX106", "indexes a tensor by a number that exists only when the graph runs")

    def _text(self, name: str, args: tuple[Any, ...]) -> Any:
        for value in args:
            self.world.touch(value)  # only then symbolic numbers are visible
        if name == "build_string":
            parts = tuple(args[0])
            return deferred_string(self.world, join_text, (parts,)) if deferred_in(parts) else ABSENT
        found = deferred_in(args[0], name)
        self.check_hidden(name, found)
        return deferred_string(self.world, _TEXT[name], args) if found else ABSENT

    def check_hidden(self, name: str, found: str) -> None:
        if found == "hidden":
            self.heap.refuse("SFX106", f"{name} of a value that is known only after the step, inside a C object")

    def _percent(self, text: str, values: Any) -> Any:
        """Returns ``text % values`` if it contains deferred values; else :data:`ABSENT`."""
        if safe_isinstance(values, tuple):  # a tuple of any class is a tuple of values
            values = tuple(tuple.__iter__(values))
        self.world.touch(values)
        found = deferred_in(values)
        self.check_hidden("%", found)
        return deferred_string(self.world, percent, (text, values)) if found else ABSENT

    def wrapped_text(self, method: str, value: Any) -> Any:
        """Returns the string that a slot wrapper (``list.__repr__``, say) makes of a value; else :data:`ABSENT`."""
        self.world.touch(value)
        found = deferred_in(value)
        if not found:
            return ABSENT
        shown = as_shown(value, method)
        if shown is None:
            found = "hidden"
        self.check_hidden(method, found)
        return deferred_string(self.world, repr, (shown,))


def _extends(record: Record | None, args: tuple[Any, ...]) -> bool:
    """Returns True for a list to which items are added; what another class than a list or tuple defines is asked
    first."""
    if not safe_isinstance(record, ListRecord) or record.shadow is not args[0] or not record.plain:
        return False
    return type(args[1]) in (list, tuple) and args[1] is not args[0]


def _decides(value: Any, name: str) -> bool:
    """Returns True for an instance of a Python class, whose own methods define operators."""
    cls = type(value)
    if cls in _TRACED or is_static(cls) or issubclass(cls, (torch.Tensor, int, float)):
        return False  # of numbers, `number_subclasses` decides
    if not issubclass(cls, _VALUES):
        return True
    methods = operators.methods_of(name) or (f"__{name}__",)
    return any(type(getattr(cls, method, None)) is types.FunctionType for method in methods)


_VALUES = (complex, str, tuple, list, dict)
_PLACES = frozenset((torch.int8, torch.int16, torch.int32, torch.int64))


def _with_nan(operands: tuple[Any, ...]) -> bool:
    """Returns True for a changing number and a NaN that is known."""
    is_number = any(type(value) in _CHANGING for value in operands)
    return is_number and any(type(value) is float and value != value for value in operands)


def _is_truth(value: Any) -> bool:
    return type(value) is bool or type(value) is torch.SymBool


def _with_infinity(name: str, operands: tuple[Any, ...]) -> bool:
    """Returns True for a changing number and a known one that is not finite: sympy takes the other for finite.

    A comparison of a number that only the graph knows is decided where the program branches on it.
    """
    changing = [value for value in operands if type(value) in _CHANGING and not compat.is_ragged_size(value)]
    if not changing or not any(type(value) is float and not math.isfinite(value) for value in operands):
        return False
    return name not in _ORDERS_NUMBERS or not any(map(compat.is_unbacked, changing))


def _is_place(value: Any) -> bool:
    """Returns True for a tensor that is an index like an integer."""
    return type(value) is compat.FakeTensor and value.dim() == 0 and value.dtype in _PLACES


def _has_bound(part: Any) -> bool:
    """Returns True for a slice with such a tensor among its bounds."""
    return type(part) is slice and any(map(_is_place, (part.start, part.stop, part.step)))


def _is_text(value: Any) -> bool:
    return type(value) is DeferredValue and (value.fn in _MAKES_TEXT or joins(value.fn))


_ORDERS_NUMBERS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
_OF_NUMBERS = frozenset({*_ARITHMETIC, *(f"i{name.strip('_')}" for name in _ARITHMETIC), *_ORDERS_NUMBERS})
"""Operators that take a truth value as the number that it is."""
_COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "invert", "xor"})
"""Operators that torch's symbolic booleans do not support, or not like Python."""
_BITWISE = frozenset({"and_", "or_", "iand", "ior"})
"""Operators that make a truth value of two, and an integer of one and another number."""
_OF_BITS = _BITWISE | {"xor", "ixor"}
_REFUSE_TRUTHS = _OF_BITS | {"sub", "isub"}
"""The same, and operators that raise for a tensor and a truth value."""
_UNIONS = frozenset({"or_", "ior"})
_SHALLOW = frozenset({"getitem", "setitem", "delitem", "iter", "next"})
_INDEXED_IN_C = (torch.Tensor, np.ndarray, list, tuple, str, bytes, bytearray, range, deque)
_CHANGING = frozenset({torch.SymInt, torch.SymFloat})
_TRACED = frozenset({compat.FakeTensor, *compat.SYMBOLS})
_TEXT: dict[str, Callable[..., Any]] = {
    "format": format,
    "str": str,
    "repr": repr,
    "ascii": ascii,
    "build_string": join_text,
}
_MAKES_TEXT = frozenset({*_TEXT.values(), percent, join_text, operator.add, json.dumps}) | TEXT_METHODS


def _is_deferred(value: Any) -> bool:
    return type(value) is DeferredValue
