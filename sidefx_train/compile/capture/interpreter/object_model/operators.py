"""Operators, truth, comparison, containment, items.

The world is called first, then Python-level dunders are interpreted in CPython's order (reflected methods of subclasses
first), then C code runs natively on the operands.
"""

from __future__ import annotations

import operator
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.object_model import attributes, percent
from sidefx_train.compile.capture.interpreter.object_model.attributes import (
    call_special,
    is_static,
    is_subtype,
    special,
)
from sidefx_train.compile.capture.interpreter.object_model.iteration import for_c_code, get_iter, step
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


SIMPLE = frozenset({int, float, bool, complex, str, bytes, type(None)})
"""Immutable types whose operators touch nothing outside: applied directly."""

SYMBOLS = {
    "add": "+", "and_": "&", "floordiv": "//", "lshift": "<<", "matmul": "@", "mul": "*", "mod": "%", "or_": "|",
    "pow": "** or pow()", "rshift": ">>", "sub": "-", "truediv": "/", "xor": "^",
    "iadd": "+=", "iand": "&=", "ifloordiv": "//=", "ilshift": "<<=", "imatmul": "@=", "imul": "*=", "imod": "%=",
    "ior": "|=", "ipow": "**=", "irshift": ">>=", "isub": "-=", "itruediv": "/=", "ixor": "^=",
    "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "gt": ">", "ge": ">=",
}  # fmt: skip
SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(operator, name) for name in SYMBOLS}
_DUNDERS = {name: f"__{name.rstrip('_')}__" for name in SYMBOLS}
_REFLECTED = {name: f"__r{name.rstrip('_')}__" for name in SYMBOLS}
_PLAIN = {name: {"iand": "and_", "ior": "or_"}.get(name, name[1:]) for name in SYMBOLS if name.startswith("i")}
_UNARY = ("neg", "pos", "invert")
_SEQUENCES = (list, tuple)
DICT_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.items()))  # their operators iterate over the other operand
_OF_SETS = ("__or__", "__and__", "__sub__", "__xor__")
_INDEXED = frozenset({list, tuple, str, bytes, bytearray, range, deque})


def methods_of(name: str) -> tuple[str, ...]:
    """Returns the names of the methods that a class may define for a numeric operator, including the reflected one."""
    if name in SWAPPED:
        return _DUNDERS[name], _DUNDERS[SWAPPED[name]], "__eq__"
    if name in _UNARY:
        return (f"__{name}__",)
    if name not in SYMBOLS:
        return ()
    plain = _PLAIN.get(name, name)
    return _DUNDERS[name], _DUNDERS[plain], _REFLECTED[plain]


def binary(interp: InterpreterAPI, name: str, left: Any, right: Any) -> Any:
    """``left + right`` and similar; ``name`` is the function's name in :mod:`operator`, also for in-place operators."""
    if type(left) in SIMPLE and type(right) in SIMPLE:
        return FUNCTIONS[name](left, right)
    if (
        name == "mod"
        and type(left) is str
        and not (issubclass(type(right), str) and special(interp, right, "__rmod__") is not ABSENT)
    ):
        answer = percent.apply(interp, left, right)
        if answer is not ABSENT:
            return answer
    answer = interp.world.override_operator(name, (left, right))
    if answer is not ABSENT:
        return answer
    if is_static(type(left)) and is_static(type(right)):
        return interp.world.native_call(FUNCTIONS[name], (left, right), {})
    plain = _PLAIN.get(name)
    if plain is not None:  # in-place
        method = special(interp, left, _DUNDERS[name])
        if method is not ABSENT:
            answer = call_special(interp, method, left, (right,))
            if answer is not NotImplemented:
                return answer
    return _two_sided(interp, name, plain or name, left, right)


def _two_sided(interp: InterpreterAPI, name: str, plain: str, left: Any, right: Any) -> Any:
    """Calls the left operand's method and the right operand's reflected one, the latter first for a subclass."""
    dunder, reflected = _DUNDERS[plain], _REFLECTED[plain]
    forward, backward = special(interp, left, dunder), special(interp, right, reflected)
    if forward is ABSENT and backward is ABSENT:
        if plain != name and safe_isinstance(left, (list, dict, deque)):
            own = interp.world.class_attr(interp.type_of(left), _DUNDERS[name])
            if own is not ABSENT:
                return interp.call(own, (left, right), {})
        if dunder in _OF_SETS and type(left) in DICT_VIEWS:
            return interp.call(getattr(type(left), dunder), (left, right), {})
        of_right = dunder in _OF_SETS and type(right) in DICT_VIEWS
        if of_right and interp.world.class_attr(interp.type_of(left), dunder) is ABSENT:
            return interp.call(getattr(type(right), reflected), (right, left), {})
        return interp.world.native_call(FUNCTIONS[name], (left, right), {})
    kind, other = interp.type_of(left), interp.type_of(right)
    tried_right = kind is other
    of_subclass = kind is not other and backward is not ABSENT and is_subtype(other, kind)
    if of_subclass and interp.world.class_attr(kind, reflected) is not interp.world.class_attr(other, reflected):
        tried_right = True
        answer = _method(interp, backward, right, left)
        if answer is not NotImplemented:
            return answer
    if forward is not ABSENT:
        answer = _method(interp, forward, left, right)
        if answer is not NotImplemented:
            return answer
    elif interp.world.class_attr(kind, "__radd__" if plain == "mul" else reflected) is not ABSENT:
        # A number of a C class; sequences have no __radd__, and their + and * come last.
        own = interp.world.class_attr(kind, dunder)
        if own is not ABSENT:
            answer = _in_c(interp, own, left, right)
            if answer is not NotImplemented:
                return answer
    if not tried_right:
        if backward is not ABSENT:
            answer = _method(interp, backward, right, left)
        else:
            own = interp.world.class_attr(other, reflected)
            answer = NotImplemented if own is ABSENT else _in_c(interp, own, right, left)
        if answer is not NotImplemented:
            return answer
    if forward is ABSENT and safe_isinstance(left, (list, tuple, str, bytes, bytearray)):
        own = interp.world.class_attr(kind, dunder)
        if own is not ABSENT:
            return interp.world.native_call(own, (left, right), {})
    if plain == "mul" and safe_isinstance(right, (list, tuple, str, bytes, bytearray)) and backward is ABSENT:
        return interp.world.native_call(operator.mul, (left, right), {})
    raise TypeError(
        f"unsupported operand type(s) for {SYMBOLS[name]}: {kind.__name__!r} and {other.__name__!r}"
    )  # fmt: skip


def _method(interp: InterpreterAPI, method: Any, obj: Any, other: Any) -> Any:
    return call_special(interp, method, obj, (other,))


def unary(interp: InterpreterAPI, name: str, value: Any) -> Any:
    """``-value``, ``+value``, ``~value``; ``name`` is ``neg``, ``pos`` or ``invert``."""
    function = getattr(operator, name)
    if type(value) in SIMPLE:
        return function(value)
    answer = interp.world.override_operator(name, (value,))
    if answer is not ABSENT:
        return answer
    method = special(interp, value, f"__{name}__")
    if method is not ABSENT and method is not None:
        return call_special(interp, method, value, ())
    return interp.world.native_call(function, (value,), {})


def compare(interp: InterpreterAPI, name: str, left: Any, right: Any) -> Any:
    """Rich comparison; ``name`` is one of ``lt le eq ne gt ge``."""
    if type(left) in SIMPLE and type(right) in SIMPLE:
        return FUNCTIONS[name](left, right)
    world = interp.world
    answer = world.override_operator(name, (left, right))
    if answer is not ABSENT:
        return answer
    kind, other = type(left), type(right)
    if is_static(kind) and is_static(other):
        if kind is other and kind in _SEQUENCES and not (_plain_items(left) and _plain_items(right)):
            return _compare_sequences(interp, name, left, right)
        return world.native_call(FUNCTIONS[name], (left, right), {})
    forward, backward = special(interp, left, _DUNDERS[name]), special(interp, right, _DUNDERS[SWAPPED[name]])
    if forward is ABSENT and backward is ABSENT:
        if name == "ne" and any(special(interp, each, "__eq__") is not ABSENT for each in (left, right)):
            # object.__ne__ calls __eq__
            return _not_equal(interp, left, right)
        return world.native_call(FUNCTIONS[name], (left, right), {})
    kind, other = interp.type_of(left), interp.type_of(right)
    right_first = kind is not other and is_subtype(other, kind) and backward is not ABSENT
    if right_first:
        answer = _half_compare(interp, SWAPPED[name], backward, right, left)
        if answer is not NotImplemented:
            return answer
    answer = _half_compare(interp, name, forward, left, right)
    if answer is not NotImplemented:
        return answer
    if not right_first:
        answer = _half_compare(interp, SWAPPED[name], backward, right, left)
        if answer is not NotImplemented:
            return answer
    if name in ("eq", "ne"):
        return identical(interp, left, right) is (name == "eq")
    raise TypeError(
        f"{SYMBOLS[name]!r} not supported between instances of {kind.__name__!r} and {other.__name__!r}"
    )  # fmt: skip


def _half_compare(interp: InterpreterAPI, name: str, method: Any, left: Any, right: Any) -> Any:
    if method is not ABSENT:
        if type(method) is not types.FunctionType:
            try:
                method = attributes.bind(interp, method, left, interp.type_of(left))
            except AttributeError:  # CPython ignores errors of this lookup
                interp.in_flight = None
                return NotImplemented
            return interp.call(method, (right,), {})
        return _method(interp, method, left, right)
    own = interp.world.class_attr(interp.type_of(left), _DUNDERS[name])
    if own is ABSENT or own is None:
        return NotImplemented
    if name == "ne" and own is object.__ne__:
        return object_ne(interp, left, right)
    if own is object.__eq__:
        return True if identical(interp, left, right) else NotImplemented
    return _in_c(interp, own, left, right)


def _in_c(interp: InterpreterAPI, own: Any, value: Any, other: Any) -> Any:
    """Calls an operator method of a C class; a method of a number accepts only numbers, also if one is symbolic."""
    if type(value) not in SIMPLE and interp.type_of(value) in (int, float, bool) and not is_static(type(other)):
        return NotImplemented
    if type(value) in DICT_VIEWS:
        return interp.call(own, (value, other), {})
    return interp.world.native_call(own, (value, other), {})


def object_ne(interp: InterpreterAPI, left: Any, right: Any) -> Any:
    """``object.__ne__``: the inverse of ``__eq__``, unless that is ``NotImplemented``."""
    answer = _half_compare(interp, "eq", special(interp, left, "__eq__"), left, right)
    return answer if answer is NotImplemented else not truth(interp, answer)


def _not_equal(interp: InterpreterAPI, left: Any, right: Any) -> Any:
    """``left != right`` for classes that define only ``__eq__``."""
    kind, other = interp.type_of(left), interp.type_of(right)
    pairs = [(left, right), (right, left)]
    if kind is not other and is_subtype(other, kind):
        pairs.reverse()
    for a, b in pairs:
        answer = _half_compare(interp, "ne", ABSENT, a, b)
        if answer is not NotImplemented:
            return answer
    return not identical(interp, left, right)


def _plain_items(items: Any) -> bool:
    return all(is_static(type(item)) and type(item) not in _SEQUENCES for item in items)


def _compare_sequences(interp: InterpreterAPI, name: str, left: Any, right: Any) -> Any:
    """Compares two lists or two tuples item by item."""
    if name in ("eq", "ne") and len(left) != len(right):
        return name == "ne"
    index = 0
    while index < len(left) and index < len(right):  # a comparison may mutate them
        a, b = left[index], right[index]
        index += 1
        if a is not b and not truth(interp, compare(interp, "eq", a, b)):
            if index > len(left) or index > len(right):
                break
            return name == "ne" if name in ("eq", "ne") else compare(interp, name, a, b)
    return FUNCTIONS[name](len(left), len(right))


def equal(interp: InterpreterAPI, left: Any, right: Any) -> bool:
    """Identity or equality, as in item comparisons of containers."""
    return left is right or truth(interp, compare(interp, "eq", left, right))


def identical(interp: InterpreterAPI, left: Any, right: Any) -> Any:
    """``left is right``."""
    answer = interp.world.override_operator("is_", (left, right))
    return left is right if answer is ABSENT else answer


def contains(interp: InterpreterAPI, container: Any, item: Any) -> bool:
    """``item in container``."""
    answer = interp.world.override_operator("contains", (container, item))
    if answer is not ABSENT:
        return answer
    kind = type(container)
    if is_static(kind):
        if kind in _SEQUENCES and not (_plain_items((item,)) and _plain_items(container)):
            return any(equal(interp, each, item) for each in container)
        return interp.world.native_call(operator.contains, (container, item), {})
    method = special(interp, container, "__contains__")
    if method is None:
        raise TypeError(f"{interp.type_of(container).__name__!r} object is not a container")
    if method is not ABSENT:
        return truth(interp, call_special(interp, method, container, (item,)))
    own = interp.world.class_attr(interp.type_of(container), "__contains__")
    if own is ABSENT and (
        special(interp, container, "__iter__") is not ABSENT or special(interp, container, "__getitem__") is not ABSENT
    ):
        iterator = get_iter(interp, container)
        while True:
            each = step(interp, iterator)
            if each is ABSENT:
                return False
            if equal(interp, each, item):
                return True
    return interp.world.native_call(operator.contains, (container, item), {})


def truth(interp: InterpreterAPI, value: Any) -> bool:
    """``bool(value)``."""
    if value is True or value is False:
        return value
    if value is None:
        return False
    if not is_static(type(value)):
        method = special(interp, value, "__bool__")
        if method is not ABSENT and method is not None:
            answer = call_special(interp, method, value, ())
            if interp.type_of(answer) is not bool:
                raise TypeError(f"__bool__ should return bool, returned {type(answer).__name__}")
            return answer if type(answer) is bool else interp.world.truth(answer)
        if interp.world.class_attr(interp.type_of(value), "__bool__") is ABSENT:
            method = special(interp, value, "__len__")
            if method is not ABSENT and method is not None:
                return as_length(interp, call_special(interp, method, value, ())) != 0
    return interp.world.truth(value)


def as_length(interp: InterpreterAPI, answer: Any) -> Any:
    """Checks the result of ``__len__``."""
    if type(answer) is int or safe_isinstance(answer, int):
        if answer < 0:
            raise ValueError("__len__() should return >= 0")
        if answer > sys.maxsize:
            raise OverflowError("cannot fit 'int' into an index-sized integer")
        return int(answer)
    if interp.world.class_attr(interp.type_of(answer), "__index__") is ABSENT:
        raise TypeError(f"{interp.type_of(answer).__name__!r} object cannot be interpreted as an integer")
    return answer


def _position(interp: InterpreterAPI, obj: Any, key: Any) -> Any:
    """Converts ``key`` for a C sequence: calls a Python-level ``__index__``."""
    return position(interp, key) if type(obj) in _INDEXED else key


def position(interp: InterpreterAPI, key: Any) -> Any:
    """Returns an index with plain integers in place of objects with a Python-level ``__index__``, also in a slice."""
    if type(key) is slice:
        parts = (key.step, key.start, key.stop)  # in the order in which C code reads them
        step, start, stop = (position(interp, part) for part in parts)
        same = step is key.step and start is key.start and stop is key.stop
        return key if same else slice(start, stop, step)
    if is_static(type(key)):
        return key
    method = special(interp, key, "__index__")
    return key if method is ABSENT or method is None else interp.call(operator.index, (key,), {})


def positions(interp: InterpreterAPI, key: Any) -> Any:
    """The same for an index of several dimensions, which may be a tuple."""
    if type(key) is not tuple:
        return position(interp, key)
    found = tuple(position(interp, item) for item in key)
    return key if all(map(operator.is_, found, key)) else found


def getitem(interp: InterpreterAPI, obj: Any, key: Any) -> Any:
    """``obj[key]``."""
    key = _position(interp, obj, key)
    answer = interp.world.override_operator("getitem", (obj, key))
    if answer is not ABSENT:
        return answer
    if safe_isinstance(obj, type):
        return _class_getitem(interp, obj, key)
    method = special(interp, obj, "__getitem__")
    if method is not ABSENT and method is not None:
        return call_special(interp, method, obj, (key,))
    if issubclass(type(obj), dict) and type(obj) is not dict and interp.type_of(obj) is type(obj):
        missing = special(interp, obj, "__missing__")
        factory = getattr(obj, "default_factory", None) if issubclass(type(obj), defaultdict) else None
        makes = missing is not ABSENT or factory is not None
        if makes and not interp.world.native_call(dict.__contains__, (obj, key), {}):
            if missing is not ABSENT:
                return call_special(interp, missing, obj, (key,))
            value = interp.call(factory, (), {})
            setitem(interp, obj, key, value)
            return value
    return interp.world.native_call(operator.getitem, (obj, key), {})


def _class_getitem(interp: InterpreterAPI, cls: type, key: Any) -> Any:
    """``cls[key]``: the metaclass's ``__getitem__``, else ``__class_getitem__``."""
    method = special(interp, cls, "__getitem__")
    if method is not ABSENT:
        return call_special(interp, method, cls, (key,))
    if cls is not type and interp.world.class_attr(interp.type_of(cls), "__getitem__") is ABSENT:
        attr = interp.world.class_attr(cls, "__class_getitem__")
        if attr is not ABSENT and attr is not None and not attributes.is_c_level(attr):
            return interp.call(attributes.bind(interp, attr, None, cls), (key,), {})
    return interp.world.native_call(operator.getitem, (cls, key), {})


def setitem(interp: InterpreterAPI, obj: Any, key: Any, value: Any) -> None:
    """``obj[key] = value``."""
    key = _position(interp, obj, key)
    if type(obj) is dict:
        key = interp.world.as_key(key)
    elif type(key) is slice and safe_isinstance(obj, list) and special(interp, obj, "__setitem__") is ABSENT:
        value = for_c_code(interp, value)
    if interp.world.override_operator("setitem", (obj, key, value)) is not ABSENT:
        return
    method = special(interp, obj, "__setitem__")
    if method is not ABSENT and method is not None:
        call_special(interp, method, obj, (key, value))
    else:
        interp.world.native_call(operator.setitem, (obj, key, value), {})


def delitem(interp: InterpreterAPI, obj: Any, key: Any) -> None:
    """``del obj[key]``."""
    key = _position(interp, obj, key)
    if interp.world.override_operator("delitem", (obj, key)) is not ABSENT:
        return
    method = special(interp, obj, "__delitem__")
    if method is not ABSENT and method is not None:
        call_special(interp, method, obj, (key,))
    else:
        interp.world.native_call(operator.delitem, (obj, key), {})
