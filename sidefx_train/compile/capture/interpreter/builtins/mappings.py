"""Substitutes for C code that fills and copies dicts and sets: it hashes keys, and calls methods of their classes."""

from __future__ import annotations

import collections
import types
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.builtins.iterables import EachItem
from sidefx_train.compile.capture.interpreter.builtins.registry import METHODS, Substitute, register, register_method
from sidefx_train.compile.capture.interpreter.object_model import iteration, operators
from sidefx_train.compile.capture.interpreter.object_model.attributes import is_c_level, is_static, special
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI

# --- keys ----------------------------------------------------------------------------------------------------------


def _as_key(interp: InterpreterAPI, item: Any) -> Any:
    return item if type(item) in operators.SIMPLE else interp.world.as_key(item)


def keys_for_c(interp: InterpreterAPI, source: Any, exact: bool = False) -> Any:
    """Prepares ``source`` for C code that hashes its items.

    Args:
        interp: the interpreter.
        source: an iterable.
        exact: the code iterates over subclasses of sets, and does not copy their members.
    """
    if safe_isinstance(source, (set, frozenset)) and not (exact and not is_static(type(source))):
        return source
    if is_static(type(source)) and not hasattr(type(source), "__next__") and type(source) is not _VALUES:
        return source  # its items are read, or are keys already
    return EachItem(interp, source, _as_key)


_VALUES: type = type({}.values())


def _of_keys(fn: Any, first: int, exact: bool = False) -> Substitute:
    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = (*args[:first], *(keys_for_c(interp, arg, exact) for arg in args[first:]))
        return interp.native(fn, found, kwargs)

    return substitute


_SETS: tuple[Any, ...] = (
    set.update, set.union, set.intersection, set.difference, set.issubset, set.issuperset, set.difference_update,
    set.intersection_update, set.symmetric_difference, set.symmetric_difference_update, set.__init__,
    frozenset.union, frozenset.intersection, frozenset.difference, frozenset.symmetric_difference,
    frozenset.issubset, frozenset.issuperset,
)  # fmt: skip
for _fn in _SETS:
    register_method(_fn)(_of_keys(_fn, 1))
for _fn in (set.isdisjoint, frozenset.isdisjoint):
    register_method(_fn)(_of_keys(_fn, 1, exact=True))
for _view in operators.DICT_VIEWS:
    for _name in ("or", "and", "sub", "xor"):
        register_method(getattr(_view, f"__{_name}__"))(_of_keys(getattr(_view, f"__{_name}__"), 1))
        register_method(getattr(_view, f"__r{_name}__"))(_of_keys(getattr(_view, f"__r{_name}__"), 1))
    register_method(_view.isdisjoint)(_of_keys(_view.isdisjoint, 1, exact=True))
for _fn in (set, frozenset):
    register(_fn)(_of_keys(_fn, 0))
register(frozenset.__new__)(_of_keys(frozenset.__new__, 1))


@register(collections._count_elements)  # type: ignore[attr-defined]
def _count(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Counts items; C code does so by the methods of the mapping if its class has its own."""
    fn = collections._count_elements  # type: ignore[attr-defined]
    own = len(args) == 2 and any(special(interp, args[0], name) is not ABSENT for name in ("get", "__setitem__"))
    if kwargs or not own:
        return interp.native(fn, (*args[:1], *(keys_for_c(interp, arg) for arg in args[1:])), kwargs)
    get = interp.getattr(args[0], "get")
    for key in iteration.to_list(interp, args[1]):
        operators.setitem(interp, args[0], key, operators.binary(interp, "add", interp.call(get, (key, 0), {}), 1))
    return None


# --- dicts ---------------------------------------------------------------------------------------------------------


def _pair(interp: InterpreterAPI, item: Any) -> Any:
    """Prepares an item of an iterable from which C code takes keys and values."""
    if is_static(type(item)) and type(item) not in (list, tuple):
        return item
    found = iteration.to_list(interp, item)  # a list that the step has not read is empty for C code
    if len(found) == 2 and type(found[0]) not in operators.SIMPLE:
        found[0] = interp.world.as_key(found[0])
    return found


def _is_plain_pair(item: Any) -> bool:
    return type(item) is tuple and len(item) == 2 and type(item[0]) in operators.SIMPLE


def for_mapping(interp: InterpreterAPI, source: Any) -> Any:
    """Prepares ``source`` for C code that fills a dict: mappings written in Python become dicts."""
    if is_read_by_keys(interp, source):
        return dict(pairs_of(interp, source))
    if safe_isinstance(source, dict) or interp.world.class_attr(interp.type_of(source), "keys") is not ABSENT:
        return source
    if type(source) is list and source and all(map(_is_plain_pair, source)):
        return source
    pairs = type(source) in (list, tuple) or hasattr(type(source), "__next__") or not is_static(type(source))
    return EachItem(interp, source, _pair) if pairs else source


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


def _filling(fn: Any, first: int = 1) -> Substitute:
    """Returns the substitute of C code that adds the items of its arguments to a dict."""

    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return interp.native(fn, (*args[:first], *(for_mapping(interp, arg) for arg in args[first:])), kwargs)

    return substitute


register(dict)(_filling(dict, first=0))
for _fn in (dict.update, dict.__init__, dict.__ior__):
    register_method(_fn)(_filling(_fn))
for _fn in (dict.__or__, dict.__ror__):
    register_method(_fn)(_filling(_fn, first=0))


@register_method(dict.copy)
def _copy_dict(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 1 and not kwargs and is_read_by_keys(interp, args[0]):
        return interp.native(dict, (dict(pairs_of(interp, args[0])),), {})
    return interp.native(dict.copy, args, kwargs)


@register_method(collections.defaultdict.__missing__)
def _default_of_missing(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs or special(interp, args[0], "__setitem__") is ABSENT or args[0].default_factory is None:
        return interp.native(collections.defaultdict.__missing__, args, kwargs)
    value = interp.call(args[0].default_factory, (), {})
    operators.setitem(interp, *args, value)
    return value


def _from_keys(fn: Any) -> Substitute:
    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cls = fn.__self__
        if kwargs or not 1 <= len(args) <= 2:
            return interp.native(fn, args, kwargs)
        return _filled_by_keys(interp, cls, fn, args)

    return substitute


def _filled_by_keys(interp: InterpreterAPI, cls: Any, fn: Any, args: tuple[Any, ...]) -> Any:
    if is_static(cls):
        return interp.native(fn, (keys_for_c(interp, args[0]), *args[1:]), {})
    made = interp.call(cls, (), {})
    value = args[1] if len(args) == 2 else None
    for key in iteration.to_list(interp, args[0]):
        operators.setitem(interp, made, key, value)
    return made


for _fn in (dict.fromkeys, collections.OrderedDict.fromkeys):
    register(_fn)(_from_keys(_fn))


def class_method(fn: Any, owner: Any) -> Substitute | None:
    """Returns the substitute of a class method in C that fills an instance of ``owner``, a subclass of ``dict``."""
    if fn.__name__ != "fromkeys" or not issubclass(owner, dict) or is_static(owner) or fn != _plain_from_keys(owner):
        return None
    return _from_keys(fn)


def _plain_from_keys(owner: Any) -> Any:
    base = collections.OrderedDict if issubclass(owner, collections.OrderedDict) else dict
    return vars(base)["fromkeys"].__get__(None, owner)


# --- OrderedDict, whose C code calls methods of subclasses ---------------------------------------------------------

_STORES = ("__setitem__", "__getitem__", "__contains__", "__delitem__", "__missing__", "keys", "__iter__")


def _has_own(interp: InterpreterAPI, owner: Any) -> bool:
    return any(special(interp, owner, name) is not ABSENT for name in _STORES)


@register(collections.OrderedDict)
def _ordered_dict(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = [pairs_of(interp, arg) if is_read_by_keys(interp, arg, fills_dict=False) else arg for arg in args]
    found = [for_mapping(interp, arg) for arg in found]
    return interp.native(collections.OrderedDict, tuple(found), kwargs)


def _ordered_filling(fn: Any) -> Substitute:
    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not 1 <= len(args) <= 2:
            return interp.native(fn, args, kwargs)
        owner, *rest = args
        if not _has_own(interp, owner):
            sources = [pairs_of(interp, arg) if is_read_by_keys(interp, arg, fills_dict=False) else arg for arg in rest]
            return interp.native(fn, (owner, *(for_mapping(interp, arg) for arg in sources)), kwargs)
        for arg in rest:
            _add(interp, owner, arg)
        for name, value in kwargs.items():
            operators.setitem(interp, owner, name, value)
        return None

    return substitute


def _add(interp: InterpreterAPI, owner: Any, source: Any) -> None:
    """Stores the items of ``source`` by the methods of an ordered dict, as its C code does."""
    if type(source) is dict:
        source = interp.call(interp.getattr(source, "items"), (), {})
    elif interp.world.class_attr(interp.type_of(source), "keys") is not ABSENT:
        for key in iteration.to_list(interp, interp.call(interp.getattr(source, "keys"), (), {})):
            operators.setitem(interp, owner, key, operators.getitem(interp, source, key))
        return
    for item in iteration.to_list(interp, source):
        pair = iteration.to_list(interp, item)
        if len(pair) != 2:
            raise ValueError(f"{'need more than' if len(pair) < 2 else 'too many values to unpack (expected'} 2")
        operators.setitem(interp, owner, *pair)


for _fn in (collections.OrderedDict.update, collections.OrderedDict.__init__):
    register_method(_fn)(_ordered_filling(_fn))


@register_method(collections.OrderedDict.copy)
def _copy_ordered(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or kwargs or is_static(type(args[0])):
        return interp.native(collections.OrderedDict.copy, args, kwargs)
    made = interp.call(interp.type_of(args[0]), (), {})
    for key in iteration.to_list(interp, interp.native(collections.OrderedDict.__iter__, args, {})):
        operators.setitem(interp, made, key, operators.getitem(interp, args[0], key))
    return made


@register_method(collections.OrderedDict.setdefault)
def _default_of_ordered(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or not 2 <= len(args) <= 3 or not _has_own(interp, args[0]):
        return interp.native(collections.OrderedDict.setdefault, args, kwargs)
    owner, key, default = (*args, None)[:3]
    if operators.contains(interp, owner, key):
        return operators.getitem(interp, owner, key)
    operators.setitem(interp, owner, key, default)
    return default


@register_method(collections.OrderedDict.__ior__)
def _add_to_ordered(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or not _has_own(interp, args[0]):
        return interp.native(collections.OrderedDict.__ior__, args, kwargs)
    _add(interp, *args)
    return args[0]


# --- bound methods -------------------------------------------------------------------------------------------------


def bound_method(fn: Any, owner: Any) -> Substitute | None:
    """Returns the substitute of a bound C method, with its owner bound."""
    for base in type(owner).__mro__:
        found = vars(base).get(fn.__name__)
        if type(found) is types.MethodDescriptorType and is_c_level(found):
            if base is not type(owner) and found.__get__(owner) != fn:  # bound by ``super()`` further up
                continue
            substitute = METHODS.get(found)
            if substitute is None:
                return None
            return lambda interp, args, kwargs: substitute(interp, (owner, *args), kwargs)
    return None
