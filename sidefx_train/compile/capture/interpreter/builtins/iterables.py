"""Substitutes for builtins over iterables and for methods of builtin containers.

Arguments of C code that iterates, calls back or compares are wrapped, so that the Python code in them is interpreted.
"""

from __future__ import annotations

import collections
import functools
import itertools
import types
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.builtins.registry import METHODS, Substitute, register, register_method
from sidefx_train.compile.capture.interpreter.object_model import formatting, iteration, operators
from sidefx_train.compile.capture.interpreter.object_model.attributes import call_special, is_static, special
from sidefx_train.compile.common.sentinels import ABSENT, NATIVE_CODE
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


@register(iter)
def _iter(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 1:
        return interp.native(iter, args, kwargs)
    return iteration.get_iter(interp, args[0])


@register(next)
def _next(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or not 1 <= len(args) <= 2:
        return interp.native(next, args, kwargs)
    if interp.world.class_attr(interp.type_of(args[0]), "__next__") is ABSENT:
        raise TypeError(f"{interp.type_of(args[0]).__name__!r} object is not an iterator")
    if len(args) == 1:
        return iteration.step_or_raise(interp, args[0])
    item = iteration.step(interp, args[0])
    return args[1] if item is ABSENT else item


@register(reversed)
def _reversed(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 1:
        return interp.native(reversed, args, kwargs)
    method = special(interp, args[0], "__reversed__")
    if method is not ABSENT and method is not None:
        return call_special(interp, method, args[0], ())
    obj = args[0]
    if method is ABSENT and special(interp, obj, "__getitem__") is not ABSENT:
        size = interp.call(len, (obj,), {})
        return iteration.ReversedSequence(interp, obj, size)
    return interp.native(reversed, args, kwargs)


def _iterables_first(fn: Any, count: int | None = None, callables: int = 0) -> None:
    """Registers ``fn``, whose iterables follow ``callables`` leading arguments; iterables that run Python are
    wrapped."""

    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        last = len(args) if count is None else callables + count
        args = tuple(
            iteration.for_c_code(interp, arg) if callables <= i < last else _for_call(interp, arg) if i < callables
            else arg for i, arg in enumerate(args)
        )  # fmt: skip
        return interp.native(fn, args, kwargs)

    register(fn)(substitute)


def _for_call(interp: InterpreterAPI, fn: Any) -> Any:
    """Wraps a callable that C code will call so that it re-enters the interpreter, also if it is a C function.

    C code passes items that the step has not read: a function that reads them must go through the world.
    """
    if fn is None:
        return fn

    def reenter(*args: Any, **kwargs: Any) -> Any:
        return interp.call(fn, args, kwargs)

    NATIVE_CODE.add(id(reenter.__code__))
    return interp.world.callback(fn, reenter)


_FIRST: tuple[Any, ...] = (
    tuple, list, set, frozenset, enumerate, dict.fromkeys, collections.deque, itertools.cycle, itertools.islice,
    itertools.accumulate, itertools.combinations, itertools.permutations, itertools.combinations_with_replacement,
    itertools.pairwise, itertools.groupby, itertools.chain.from_iterable, itertools.tee,
)  # fmt: skip
_ALL: tuple[Any, ...] = (zip, itertools.chain, itertools.zip_longest, itertools.product)
_AFTER_CALLABLE: tuple[Any, ...] = (
    map, filter, itertools.filterfalse, itertools.takewhile, itertools.dropwhile, itertools.starmap,
)  # fmt: skip
for _fn in _FIRST:
    _iterables_first(_fn, count=1)
for _fn in _ALL:
    _iterables_first(_fn)
for _fn in _AFTER_CALLABLE:
    _iterables_first(_fn, callables=1)
_iterables_first(functools.reduce, count=1, callables=1)
_iterables_first(itertools.compress, count=2)


@register(sum)
def _sum(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not 1 <= len(args) + len(kwargs) <= 2 or set(kwargs) - {"start"} or not args:
        return interp.native(sum, args, kwargs)
    items = iteration.to_list(interp, args[0])
    start = args[1] if len(args) == 2 else kwargs.get("start", 0)
    if all(is_static(type(item)) for item in items) and is_static(type(start)):
        return interp.native(sum, (items, start), {})
    total = start
    for item in items:
        total = operators.binary(interp, "add", total, item)
    return total


@register(any)
def _any(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 1:
        return interp.native(any, args, kwargs)
    iterator = iteration.get_iter(interp, args[0])
    while (item := iteration.step(interp, iterator)) is not ABSENT:
        if operators.truth(interp, item):
            return True
    return False


@register(all)
def _all(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 1:
        return interp.native(all, args, kwargs)
    iterator = iteration.get_iter(interp, args[0])
    while (item := iteration.step(interp, iterator)) is not ABSENT:
        if not operators.truth(interp, item):
            return False
    return True


def _extreme(fn: Any, better: str) -> None:
    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if set(kwargs) - {"key", "default"} or not args or (len(args) > 1 and "default" in kwargs):
            return interp.native(fn, args, kwargs)
        items = iteration.to_list(interp, args[0]) if len(args) == 1 else args
        key = kwargs.get("key")
        if not items:
            return interp.native(fn, ((),), {k: v for k, v in kwargs.items() if k == "default"})
        best: Any = ABSENT
        best_key: Any = ABSENT
        for item in items:
            value = item if key is None else interp.call(key, (item,), {})
            if best_key is ABSENT or operators.truth(interp, operators.compare(interp, better, value, best_key)):
                best, best_key = item, value
        return best

    register(fn)(substitute)


_extreme(min, "lt")
_extreme(max, "gt")


class _Ordered:
    """Sort key whose comparisons are interpreted."""

    __slots__ = ("interp", "value")

    def __init__(self, interp: InterpreterAPI, value: Any) -> None:
        self.interp = interp
        self.value = value

    def __lt__(self, other: _Ordered) -> bool:
        return operators.truth(self.interp, operators.compare(self.interp, "lt", self.value, other.value))


@register(sorted)
def _sorted(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or set(kwargs) - {"key", "reverse"}:
        return interp.native(sorted, args, kwargs)
    items = iteration.to_list(interp, args[0], hinted=True)
    return _in_order(interp, items, kwargs.get("key"), kwargs.get("reverse", False))


def _in_order(interp: InterpreterAPI, items: list[Any], key: Any, reverse: Any) -> list[Any]:
    keys = items if key is None else [interp.call(key, (item,), {}) for item in items]
    down = bool(operators.truth(interp, reverse))
    if not all(type(k) in operators.SIMPLE for k in keys):
        keys = [_Ordered(interp, k) for k in keys]
    order = sorted(range(len(items)), key=keys.__getitem__, reverse=down)
    return [items[i] for i in order]


def _list_sort(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or set(kwargs) - {"key", "reverse"}:
        return interp.native(list.sort, args, kwargs)
    owner = args[0]
    items = iteration.to_list(interp, owner)
    key, reverse = kwargs.get("key"), kwargs.get("reverse", False)
    if key is None and all(type(item) in operators.SIMPLE for item in items):
        operators.setitem(interp, owner, slice(None), _in_order(interp, items, None, reverse))
        return None
    operators.setitem(interp, owner, slice(None), [])  # the list is empty while keys and comparisons run
    ordered = items
    try:
        ordered = _in_order(interp, items, key, reverse)
    finally:
        changed = len(owner) > 0
        if not interp.stopped:
            operators.setitem(interp, owner, slice(None), ordered)
    if changed:
        raise ValueError("list modified during sort")
    return None


def _list_find(fn: Any) -> Substitute:
    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, *rest = args
        items = iteration.to_list(interp, owner)
        if kwargs or len(rest) != 1 or all(is_static(type(item)) for item in (*items, *rest)):
            return interp.native(fn, args, kwargs)
        if fn.__name__ == "count":
            return sum(operators.equal(interp, item, rest[0]) for item in items)
        for index, item in enumerate(items):
            if operators.equal(interp, item, rest[0]):
                if fn.__name__ == "index":
                    return index
                return operators.delitem(interp, owner, index)
        return interp.native(fn, ([], *rest) if safe_isinstance(owner, list) else ((), *rest), kwargs)

    return substitute


def _wrapping(fn: Any) -> Substitute:
    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return interp.native(fn, (args[0], *(iteration.for_c_code(interp, arg) for arg in args[1:])), kwargs)

    return substitute


def _str_format(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if all(is_static(type(v)) for v in (*args, *kwargs.values())):
        return interp.native(str.format, args, kwargs)
    template, *rest = args

    class Formatter:
        """Wraps a value so that formatting it re-enters the interpreter."""

        def __init__(self, value: Any) -> None:
            self.__value = value

        def __format__(self, spec: str) -> str:
            return formatting.to_format(interp, self.__value, spec)

        def __str__(self) -> str:
            return formatting.to_str(interp, self.__value)

        def __repr__(self) -> str:
            return formatting.to_repr(interp, self.__value)

        def __getattr__(self, name: str) -> Any:
            return Formatter(interp.getattr(self.__value, name))

        def __getitem__(self, key: Any) -> Any:
            return Formatter(operators.getitem(interp, self.__value, key))

    def wrap(value: Any) -> Any:
        return value if is_static(type(value)) else Formatter(value)

    wrapped = {name: wrap(value) for name, value in kwargs.items()}
    return interp.native(str.format, (template, *map(wrap, rest)), wrapped)


register_method(list.sort)(_list_sort)
register_method(str.format)(_str_format)
_FIND: tuple[Any, ...] = (list.index, list.remove, list.count, tuple.index, tuple.count)
_TAKE_ITERABLES: tuple[Any, ...] = (
    list.extend, str.join, bytes.join, set.update, set.union, set.intersection, set.difference, set.issubset,
    set.issuperset, set.difference_update, set.intersection_update, set.symmetric_difference,
    set.symmetric_difference_update, set.isdisjoint, frozenset.union, frozenset.intersection, frozenset.difference,
    frozenset.issubset, frozenset.issuperset, collections.deque.extend, collections.deque.extendleft,
)  # fmt: skip
for _fn in _FIND:
    register_method(_fn)(_list_find(_fn))
for _fn in _TAKE_ITERABLES:
    register_method(_fn)(_wrapping(_fn))


def bound_method(fn: Any, owner: Any) -> Substitute | None:
    """Returns the substitute of a bound C method, with its owner bound."""
    for base in type(owner).__mro__:
        found = vars(base).get(fn.__name__)
        if found is not None:
            substitute = METHODS.get(found) if type(found) is types.MethodDescriptorType else None
            if substitute is None:
                return None
            return lambda interp, args, kwargs: substitute(interp, (owner, *args), kwargs)
    return None


@register(dict)
def _dict(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return interp.native(dict, tuple(for_mapping(interp, arg) for arg in args), kwargs)


def for_mapping(interp: InterpreterAPI, source: Any) -> Any:
    """Prepares ``source`` for C code that fills a dict: mappings written in Python become dicts."""
    if is_static(type(source)):
        return source
    if is_read_by_keys(interp, source):
        return dict(pairs_of(interp, source))
    if safe_isinstance(source, dict) or interp.world.class_attr(interp.type_of(source), "keys") is not ABSENT:
        return source
    return iteration.for_c_code(interp, source)


def is_read_by_keys(interp: InterpreterAPI, source: Any, fills_dict: bool = True) -> bool:
    """Returns True if C code reads a mapping through its ``keys`` and ``__getitem__``, one of which is Python code.

    Args:
        interp: the interpreter.
        source: the mapping.
        fills_dict: the code is that of ``dict``, which looks into a dict directly unless its class has an iteration of
            its own; ``OrderedDict`` looks into exact dicts alone.
    """
    if is_static(type(source)) or interp.world.class_attr(interp.type_of(source), "keys") is ABSENT:
        return False
    in_c = fills_dict and safe_isinstance(source, dict) and not safe_isinstance(source, collections.OrderedDict)
    if in_c and special(interp, source, "__iter__") is ABSENT:
        return False
    return any(special(interp, source, name) is not ABSENT for name in ("keys", "__getitem__"))


def pairs_of(interp: InterpreterAPI, source: Any) -> list[tuple[Any, Any]]:
    """Returns the items of a mapping as its ``keys`` and ``__getitem__`` give them; a key may occur twice."""
    keys = iteration.to_list(interp, interp.call(interp.getattr(source, "keys"), (), {}))
    return [(key, operators.getitem(interp, source, key)) for key in keys]


@register(collections.OrderedDict)
def _ordered_dict(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = [pairs_of(interp, arg) if is_read_by_keys(interp, arg, fills_dict=False) else arg for arg in args]
    return interp.native(collections.OrderedDict, tuple(found), kwargs)


def _filling(fn: Any) -> Substitute:
    """Returns the substitute of a method of ``dict`` that adds the items of its argument."""

    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return interp.native(fn, (*args[:1], *(for_mapping(interp, arg) for arg in args[1:])), kwargs)

    return substitute


register_method(dict.update)(_filling(dict.update))
register(dict.__init__)(_filling(dict.__init__))
METHOD_NAMES = frozenset(fn.__name__ for fn in METHODS)
