"""Substitutes for operator functions and for builtins that dispatch to one dunder method."""

from __future__ import annotations

import builtins
import collections
import functools
import inspect
import math
import operator
import pickle
import types
import typing
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.builtins import warn
from sidefx_train.compile.capture.interpreter.builtins.registry import Substitute, register
from sidefx_train.compile.capture.interpreter.bytecode_versions import TYPE_PARAMETERS_IN_C
from sidefx_train.compile.capture.interpreter.object_model import formatting, operators
from sidefx_train.compile.capture.interpreter.object_model.attributes import (
    call_special,
    is_c_level,
    is_static,
    special,
)
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


CONTAINERS = (
    list, tuple, dict, set, frozenset, collections.deque, types.MappingProxyType, str, bytes, property, classmethod,
    staticmethod, functools.partial, types.SimpleNamespace, types.MethodType,
)  # fmt: skip
"""Types whose methods store or inspect callables, and call none except the key of ``list.sort``."""
KEEPS: list[Any] = [
    id, hash, repr, callable, len, print, property, staticmethod, classmethod, functools.partial, types.MethodType,
    weakref.ref, weakref.proxy, builtins.isinstance, issubclass, type, type.__new__, object.__new__, object.__init__,
    operator.is_, operator.is_not, operator.eq, operator.contains, operator.setitem, operator.getitem, super, bool,
    list, tuple, dict, set, frozenset, types.SimpleNamespace, setattr, getattr, hasattr, delattr, dir, vars,
    inspect.unwrap, types.FunctionType, builtins.__build_class__, pickle.dumps, pickle.dump, pickle.Pickler,
]  # fmt: skip
"""C callables that store or inspect callables but do not call them."""


def _one_operand(fn: Any, apply: Callable[[InterpreterAPI, Any], Any]) -> None:
    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or len(args) != 1:
            return interp.native(fn, args, kwargs)
        return apply(interp, args[0])

    register(fn)(substitute)


def _two_operands(fn: Any, apply: Callable[[InterpreterAPI, Any, Any], Any]) -> None:
    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or len(args) != 2:
            return interp.native(fn, args, kwargs)
        return apply(interp, args[0], args[1])

    register(fn)(substitute)


def _named(apply: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Binds the operator's name to ``apply``."""
    return lambda interp, *operands: apply(interp, name, *operands)


def _register_operators() -> None:
    for name in operators.FUNCTIONS:
        apply = operators.compare if name in operators.SWAPPED else operators.binary
        _two_operands(getattr(operator, name), _named(apply, name))
    for name in ("neg", "pos", "invert"):
        _one_operand(getattr(operator, name), _named(operators.unary, name))
    _two_operands(operator.getitem, operators.getitem)
    _two_operands(operator.delitem, operators.delitem)
    _two_operands(operator.contains, operators.contains)
    _two_operands(operator.is_, operators.identical)
    _two_operands(operator.is_not, lambda i, a, b: not operators.identical(i, a, b))
    _one_operand(operator.truth, operators.truth)
    _one_operand(operator.not_, lambda i, a: not operators.truth(i, a))
    _one_operand(bool, operators.truth)
    _one_operand(repr, formatting.to_repr)
    _one_operand(ascii, formatting.to_ascii)
    _one_operand(str, formatting.to_str)


_register_operators()


@register(operator.setitem)
def _setitem(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3:
        return interp.native(operator.setitem, args, kwargs)
    return operators.setitem(interp, *args)


@register(pow)
def _pow(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return interp.native(pow, args, kwargs)
    return operators.binary(interp, "pow", *args)


@register(divmod)
def _divmod(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not kwargs and len(args) == 2:
        for obj, other, name in ((args[0], args[1], "__divmod__"), (args[1], args[0], "__rdivmod__")):
            method = special(interp, obj, name)
            if method is not ABSENT and method is not None:
                answer = call_special(interp, method, obj, (other,))
                if answer is not NotImplemented:
                    return answer
    return interp.native(divmod, args, kwargs)


@register(format)
def _format(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or not 1 <= len(args) <= 2:
        return interp.native(format, args, kwargs)
    return formatting.to_format(interp, args[0], args[1] if len(args) == 2 else "")


@register(len)
def _len(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not kwargs and len(args) == 1:
        method = special(interp, args[0], "__len__")
        if method is not ABSENT and method is not None:
            return operators.as_length(interp, call_special(interp, method, args[0], ()))
    return interp.native(len, args, kwargs)


def _register_dunders() -> None:
    """Registers builtins that call one dunder of their only argument and check the class of the result."""

    def make(fn: Any, names: tuple[str, ...], want: Any) -> None:
        def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if fn is operator.index and args and issubclass(type(args[0]), int):
                return interp.native(fn, args, kwargs)
            if args and not is_static(type(args[0])) and (len(args) == 1 or fn is round):
                for name in names:
                    method = interp.world.class_attr(interp.type_of(args[0]), name)
                    if method is ABSENT:
                        continue
                    if method is None or is_c_level(method):
                        break
                    answer = call_special(interp, method, args[0], args[1:], kwargs)
                    if want is None:
                        return answer
                    if interp.type_of(answer) is want and type(answer) is not want:  # a symbolic number
                        return interp.world.as_key(answer) if fn is hash else answer
                    if not safe_isinstance(answer, want):
                        raise TypeError(_wrong_answer(interp, name, want, args[0], answer))
                    if fn is hash:
                        return -2 if answer == -1 else int(answer) if -(2**63) <= answer < 2**63 else hash(int(answer))
                    if type(answer) is not want:
                        text = _wrong_answer(interp, name, want, args[0], answer)
                        text += f".  The ability to return an instance of a strict subclass of {want.__name__} is "
                        text += "deprecated, and may not be supported in a future version of Python."
                        interp.call(warnings.warn, (text, DeprecationWarning, 1), {})
                    return fn(answer) if fn in (int, float, complex) else answer
            return interp.native(fn, args, kwargs)

        register(fn)(substitute)

    make(abs, ("__abs__",), None)
    make(round, ("__round__",), None)
    make(hash, ("__hash__",), int)
    make(int, ("__int__", "__index__"), int)
    make(float, ("__float__",), float)
    make(complex, ("__complex__",), complex)
    make(operator.index, ("__index__",), int)
    make(math.floor, ("__floor__",), None)
    make(math.ceil, ("__ceil__",), None)
    make(math.trunc, ("__trunc__",), None)


def _wrong_answer(interp: InterpreterAPI, name: str, want: type, obj: Any, answer: Any) -> str:
    if name == "__hash__":
        return "__hash__ method should return an integer"
    kind = f"{interp.type_of(obj).__name__}." if want in (float, complex) else ""
    return f"{kind}{name} returned non-{want.__name__} (type {interp.type_of(answer).__name__})"


_register_dunders()


@register(print)
def _print(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shown = tuple(arg if is_static(type(arg)) else formatting.to_str(interp, arg) for arg in args)
    return interp.native(print, shown, kwargs)


@register(warnings.warn)
def _warn(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return warn.warn(interp, args, kwargs)


def run_code(
    interp: InterpreterAPI,
    code: types.CodeType,
    spaces: tuple[Any, ...],
    kwargs: dict[str, Any],
    local_names: Callable[[InterpreterAPI], Any],
) -> Any:
    """Runs a code object of ``eval`` or ``exec`` in the namespaces ``spaces``."""
    frame = interp.current_frame
    given = (*spaces, None, None)
    space = kwargs.get("globals", given[0])
    local = kwargs.get("locals", given[1])
    if space is None:
        if frame is None:
            raise Unsupported("SFX111", "eval or exec outside any interpreted frame")
        space = frame.globals
        if local is None:
            local = local_names(interp)
    elif local is None:
        local = space
    if not safe_isinstance(space, dict):
        raise TypeError("globals must be a dict")
    interp.world.run_in(space)
    if safe_isinstance(local, dict):
        interp.world.run_in(local)
    if "__builtins__" not in space:
        space["__builtins__"] = vars(builtins)
    return interp.run_body(code, space, None, local)


def _of_this_module(kind: Any) -> Substitute:
    def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = interp.native(kind, args, kwargs)
        if interp.current_frame is not None:
            made.__module__ = interp.current_frame.globals.get("__name__")
        return made

    return substitute


if TYPE_PARAMETERS_IN_C:
    for _kind in (typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple):
        register(_kind)(_of_this_module(_kind))
