"""Substitutes for builtins over iterables and for methods of builtin containers.

Arguments of C code that iterates, calls back or compares are wrapped, so that the Python code in them is interpreted.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json.scanner
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.builtins.registry import Substitute, register, register_method
from sidefx_train.compile.capture.interpreter.object_model import iteration, operators, str_format
from sidefx_train.compile.capture.interpreter.object_model.attributes import (
    call_special,
    is_c_level,
    is_static,
    special,
)
from sidefx_train.compile.capture.interpreter.object_model.function_calls import runs_python
from sidefx_train.compile.common.sentinels import ABSENT, NATIVE_CODE
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


@register(iter)
def _iter(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not kwargs and len(args) == 2:
        return interp.native(iter, (_for_call(interp, args[0], _compared), _compared(interp, args[1])), kwargs)
    if kwargs or len(args) != 1:
        return interp.native(iter, args, kwargs)
    return iteration.get_iter(interp, args[0])


def _compared(interp: InterpreterAPI, value: Any) -> Any:
    """Prepares a value for C code that compares it."""
    return value if is_static(interp.type_of(value)) else interp.world.as_key(value)


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
    if is_c_level(interp.world.class_attr(interp.type_of(args[0]), "__reversed__")):
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


def _for_call(
    interp: InterpreterAPI, fn: Any, prepare: Callable[[InterpreterAPI, Any], Any] = lambda interp, value: value
) -> Any:
    """Wraps a callable that C code will call so that it re-enters the interpreter, also if it is a C function.

    C code passes items that the step has not read: a function that reads them must go through the world.

    Args:
        interp: the interpreter.
        fn: the callable.
        prepare: makes what C code gets of the result.
    """
    if fn is None:
        return fn

    def reenter(*args: Any, **kwargs: Any) -> Any:
        return prepare(interp, interp.call(fn, args, kwargs))

    NATIVE_CODE.add(id(reenter.__code__))
    return interp.world.callback(fn, reenter)


_FIRST: tuple[Any, ...] = (
    tuple, list, enumerate, collections.deque, itertools.cycle, itertools.islice,
    itertools.combinations, itertools.permutations, itertools.combinations_with_replacement,
    itertools.pairwise, itertools.tee,
)  # fmt: skip
_ALL: tuple[Any, ...] = (zip, itertools.chain, itertools.zip_longest, itertools.product)
_PREDICATED: tuple[Any, ...] = (filter, itertools.filterfalse, itertools.takewhile, itertools.dropwhile)
for _fn in _FIRST:
    _iterables_first(_fn, count=1)
for _fn in _ALL:
    _iterables_first(_fn)
_iterables_first(map, callables=1)
_iterables_first(functools.reduce, count=1, callables=1)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """Returns arguments by position or name, :data:`ABSENT` for each that is not given."""
    return [args[i] if i < len(args) else kwargs.get(name, ABSENT) for i, name in enumerate(names)]


def _truth_of(interp: InterpreterAPI, fn: Any) -> Any:
    """Returns a function for C code: the truth of what ``fn`` returns, of the item itself for ``None``."""

    def decide(item: Any) -> bool:
        return operators.truth(interp, item if fn is None else interp.call(fn, (item,), {}))

    NATIVE_CODE.add(id(decide.__code__))
    return interp.world.callback(fn, decide)


def _predicated(fn: Any) -> None:
    """Registers ``fn``, which keeps or drops items by the truth of what a function returns for them."""

    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or len(args) != 2:
            return interp.native(fn, args, kwargs)
        predicate, source = args
        return interp.native(fn, (_truth_of(interp, predicate), iteration.for_c_code(interp, source)), {})

    register(fn)(substitute)


for _fn in _PREDICATED:
    _predicated(_fn)


_MAKE_SCANNER: Any = json.scanner.make_scanner
"""The class in C whose instances parse JSON."""


@register(_MAKE_SCANNER)
def _json_scanner(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 1:
        return interp.native(_MAKE_SCANNER, args, kwargs)
    context = types.SimpleNamespace(strict=interp.getattr(args[0], "strict"))
    for name in ("object_hook", "object_pairs_hook", "parse_float", "parse_int", "parse_constant"):
        fn = interp.getattr(args[0], name)
        setattr(context, name, _for_call(interp, fn) if runs_python(fn) else fn)
    return interp.native(_MAKE_SCANNER, (context,), {})


@register(itertools.compress)
def _compress(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    data, selectors, *rest = _given(args, kwargs, "data", "selectors")
    if rest or data is ABSENT or selectors is ABSENT:
        return interp.native(itertools.compress, args, kwargs)
    chosen = interp.native(map, (_truth_of(interp, bool), iteration.for_c_code(interp, selectors)), {})
    return interp.native(itertools.compress, (iteration.for_c_code(interp, data), chosen), {})


@register(itertools.accumulate)
def _accumulate(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, fn = _given(args, kwargs, "iterable", "func")
    if source is ABSENT or len(args) > 2:
        return interp.native(itertools.accumulate, args, kwargs)
    add = operator.add if fn is ABSENT or fn is None else fn
    initial = {name: value for name, value in kwargs.items() if name not in ("iterable", "func")}
    found = (iteration.for_c_code(interp, source), _for_call(interp, add))
    return interp.native(itertools.accumulate, found, initial)


@register(itertools.groupby)
def _groupby(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, key = _given(args, kwargs, "iterable", "key")
    if source is ABSENT:
        return interp.native(itertools.groupby, args, kwargs)

    def find(item: Any) -> Any:
        found = item if key is ABSENT or key is None else interp.call(key, (item,), {})
        return interp.world.as_key(found)  # C code compares it with the next one

    NATIVE_CODE.add(id(find.__code__))
    found = (iteration.for_c_code(interp, source), interp.world.callback(None if key is ABSENT else key, find))
    return interp.native(itertools.groupby, found, {})


def _iterable(interp: InterpreterAPI, item: Any) -> Any:
    """Prepares an item over which C code iterates: the step may not have read it."""
    return iteration.get_iter(interp, item) if is_static(type(item)) else iteration.for_c_code(interp, item)


def _of_iterables(fn: Any, position: int) -> None:
    """Registers ``fn``, which iterates over each item of the iterable at ``position``."""

    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or len(args) != position + 1:
            return interp.native(fn, args, kwargs)
        source = args[position]
        if _yields_static(interp, source):  # the native call reads what it holds
            inner = iteration.for_c_code(interp, source)
        else:
            inner = EachItem(interp, source, _iterable)
        return interp.native(fn, (*(_for_call(interp, arg) for arg in args[:position]), inner), {})

    register(fn)(substitute)


def _yields_static(interp: InterpreterAPI, source: Any) -> bool:
    """Returns True if C code alone iterates over the items of an iterable."""
    if type(source) in (zip, enumerate):
        return True
    return type(source) in (list, tuple) and all(is_static(type(item)) for item in iteration.to_list(interp, source))


class EachItem(iteration.PythonIterable):
    """Lets C code iterate over an object, and over what is made of each of its items."""

    def __init__(self, interp: InterpreterAPI, obj: Any, prepare: Callable[[InterpreterAPI, Any], Any]) -> None:
        super().__init__(interp, obj)
        self.prepare = prepare

    def __iter__(self) -> Any:
        return _EachItem(self.interp, iteration.get_iter(self.interp, self.obj), self.prepare)


class _EachItem(iteration.PythonIterator):
    def __init__(self, interp: InterpreterAPI, iterator: Any, prepare: Callable[[InterpreterAPI, Any], Any]) -> None:
        super().__init__(interp, iterator)
        self.prepare = prepare

    def __next__(self) -> Any:
        return self.prepare(self.interp, super().__next__())


for _cls in (EachItem, _EachItem):
    NATIVE_CODE.update(id(_fn.__code__) for _fn in vars(_cls).values() if safe_isinstance(_fn, types.FunctionType))
_of_iterables(itertools.chain.from_iterable, 0)
_of_iterables(itertools.starmap, 1)


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
        if key is None and len(args) == 1 and len(items) > 1:  # as of arguments, which the world may answer
            return interp.call(fn, tuple(items), {})
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


def _stored(interp: InterpreterAPI, owner: Any) -> list[Any]:
    """Returns the items of a list or tuple as its own C methods read them, not by an iteration of the program."""
    if type(owner) in (list, tuple):
        return iteration.to_list(interp, owner)
    if safe_isinstance(owner, list):
        found: list[Any] = interp.native(list.copy, (owner,), {})
        return found
    return list(interp.native(tuple.__getitem__, (owner, slice(None)), {}))


def _list_find(fn: Any) -> Substitute:
    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, *rest = args
        items = _stored(interp, owner)
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
    made = str_format.by_fields(interp, args[0], args[1:], kwargs) if args else ABSENT
    return interp.native(str.format, args, kwargs) if made is ABSENT else made


def _str_format_map(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = str_format.by_fields(interp, args[0], None, args[1]) if len(args) == 2 and not kwargs else ABSENT
    return interp.native(str.format_map, args, kwargs) if made is ABSENT else made


register_method(list.sort)(_list_sort)
register_method(str.format_map)(_str_format_map)
register_method(str.format)(_str_format)
_FIND: tuple[Any, ...] = (list.index, list.remove, list.count, tuple.index, tuple.count)
_TAKE_ITERABLES: tuple[Any, ...] = (
    list.extend, list.__iadd__, list.__init__, str.join, bytes.join, collections.deque.extend,
    collections.deque.extendleft, collections.deque.__iadd__,
)  # fmt: skip
for _fn in _FIND:
    register_method(_fn)(_list_find(_fn))
for _fn in _TAKE_ITERABLES:
    register_method(_fn)(_wrapping(_fn))


@register_method(list.__setitem__)
def _list_setitem(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 3 and type(args[1]) is slice:
        args = (*args[:2], iteration.for_c_code(interp, args[2]))
    return interp.native(list.__setitem__, args, kwargs)


@register(tuple.__new__)
def _new_tuple(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = (*args[:1], *(iteration.for_c_code(interp, arg) for arg in args[1:]))
    return interp.native(tuple.__new__, found, kwargs)
