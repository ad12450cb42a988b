"""Calls: binds arguments to parameters, creates instances, calls callable objects."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from sidefx_train.compile.capture.interpreter.builtins.registry import SUBSTITUTES
from sidefx_train.compile.capture.interpreter.frame import NULL
from sidefx_train.compile.capture.interpreter.object_model import attributes
from sidefx_train.compile.common.sentinels import ABSENT, transparent
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.code import CodeInfo
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


_SLOT = types.WrapperDescriptorType


def bind_arguments(
    interp: InterpreterAPI, fn: types.FunctionType, info: CodeInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Returns the slots of a new frame of ``fn``, with its arguments bound.

    Raises:
        TypeError: as in CPython, with the same message.
    """
    code = info.code
    count, given = code.co_argcount, len(args)
    slots = [NULL] * len(info.slots)
    if info.simple and given == count and not kwargs:
        slots[:count] = args
        return slots
    flags = code.co_flags
    total = count + code.co_kwonlyargcount
    extra: dict[str, Any] | None = None
    if given > count and not flags & inspect.CO_VARARGS:
        _refuse(fn, args, kwargs)
    taken = min(given, count)
    slots[:taken] = args[:taken]
    after = total
    if flags & inspect.CO_VARARGS:
        slots[after] = args[count:]
        after += 1
    if flags & inspect.CO_VARKEYWORDS:
        extra = slots[after] = {}
    if kwargs:
        positions = info.arguments
        for name, value in kwargs.items():
            position = positions.get(name)
            if position is None:
                if extra is None or not safe_isinstance(name, str):
                    _refuse(fn, args, kwargs)
                extra[name] = value
            elif slots[position] is not NULL:
                _refuse(fn, args, kwargs)
            else:
                slots[position] = value
    if given < count:
        defaults = interp.world.native_getattr(fn, "__defaults__") if fn.__defaults__ else ()
        first = count - len(defaults)
        for i in range(given, count):
            if slots[i] is NULL:
                if i < first:
                    _refuse(fn, args, kwargs)
                slots[i] = defaults[i - first]
    if total > count:
        named = None
        for i in range(count, total):
            if slots[i] is NULL:
                if named is None:
                    named = interp.world.native_getattr(fn, "__kwdefaults__") if fn.__kwdefaults__ else {}
                name = code.co_varnames[i]
                if name not in named:
                    _refuse(fn, args, kwargs)
                slots[i] = named[name]
    return slots


def _nothing() -> None:
    return None


def _refuse(fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Raises CPython's own ``TypeError`` of a call that does not fit, with a function of the same signature."""
    body = _nothing.__code__
    code = fn.__code__.replace(
        co_code=body.co_code,
        co_exceptiontable=b"",
        co_freevars=(),
        co_cellvars=(),
        co_flags=fn.__code__.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) | inspect.CO_OPTIMIZED
        | inspect.CO_NEWLOCALS,
        co_consts=(None,),
        co_stacksize=body.co_stacksize,
    )  # fmt: skip
    stub = types.FunctionType(code, {}, fn.__name__, fn.__defaults__)
    stub.__kwdefaults__ = fn.__kwdefaults__
    stub.__qualname__ = fn.__qualname__
    stub(*args, **kwargs)
    raise TypeError(f"{fn.__qualname__}() was called with arguments that do not fit")


def construct(interp: InterpreterAPI, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``cls(*args, **kwargs)``: the metaclass's ``__call__``, or ``__new__`` and ``__init__``."""
    world = interp.world
    meta = interp.type_of(cls)
    if meta is not type:
        own_call = world.class_attr(meta, "__call__")
        if type(own_call) is not _SLOT:
            return interp.call(attributes.bind(interp, own_call, cls, meta), args, kwargs)
    return type_call(interp, cls, args, kwargs)


def _calls_plainly(interp: InterpreterAPI, cls: type) -> bool:
    """Returns True if C code may call the class: its metaclass defines no ``__call__`` to interpret."""
    meta = interp.type_of(cls)
    return meta is type or type(interp.world.class_attr(meta, "__call__")) is _SLOT


def type_call(interp: InterpreterAPI, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``type.__call__(cls, *args, **kwargs)``."""
    world = interp.world
    if cls is type and len(args) == 1 and not kwargs:
        return interp.type_of(args[0])
    if attributes.is_static(cls):
        return interp.native(cls, args, kwargs)
    new, init = world.class_attr(cls, "__new__"), world.class_attr(cls, "__init__")
    in_c = type(new) is types.BuiltinFunctionType and type(init) is _SLOT and _calls_plainly(interp, cls)
    if (in_c and not (args or kwargs)) or (in_c and id(init) not in SUBSTITUTES and id(new) not in SUBSTITUTES):
        return interp.native(cls, args, kwargs)
    if type(new) is staticmethod:
        new = new.__func__
    elif type(new) is not types.BuiltinFunctionType:
        new = attributes.bind(interp, new, None, cls)
    obj = interp.call(new, (cls, *args), kwargs)
    kind = interp.type_of(obj)
    if kind is not cls and not attributes.is_subtype(kind, cls):
        return obj
    if kind is not cls:
        init = world.class_attr(kind, "__init__")
    if type(init) is _SLOT:
        if init is not object.__init__ or type(new) is types.BuiltinFunctionType:
            interp.call(init, (obj, *args), kwargs)
        return obj
    if type(init) is types.FunctionType:
        answer = interp.call(init, (obj, *args), kwargs)
    else:
        answer = interp.call(attributes.bind(interp, init, obj, kind), args, kwargs)
    if answer is not None:
        raise TypeError(f"__init__() should return None, not {type(answer).__name__!r}")
    return obj


@transparent
def call_object(interp: InterpreterAPI, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an object that is neither a function nor a class: by its Python-level ``__call__`` or natively."""
    if type(fn) is functools.partial:
        return call_partial(interp, fn, args, kwargs)
    if type(fn) in GETTERS and len(args) == 1 and not kwargs:
        return _get(interp, fn, args[0])
    attr = attributes.special(interp, fn, "__call__")
    if attr is ABSENT and issubclass(type(fn), functools.partial):
        return call_partial(interp, fn, args, kwargs)
    if attr is ABSENT:
        return interp.native(fn, args, kwargs)
    if type(attr) is types.FunctionType:
        return interp.call(attr, (fn, *args), kwargs)
    return interp.call(attributes.bind(interp, attr, fn, interp.type_of(fn)), args, kwargs)


@transparent
def call_partial(interp: InterpreterAPI, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``functools.partial.__call__(fn, *args, **kwargs)``."""
    load: Callable[[Any, str], Any] = interp.getattr
    if any(name in vars(cls) for cls in type(fn).__mro__[:-2] for name in ("func", "args", "keywords")):

        def load(partial: Any, name: str) -> Any:  # C code bypasses, say, a ``func`` of the class
            return interp.native(vars(functools.partial)[name].__get__, (partial,), {})

    keywords = load(fn, "keywords")
    merged = {**{name: interp.getitem(keywords, name) for name in interp.iterate(keywords)}, **kwargs}
    return interp.call(load(fn, "func"), _filled(interp.iterate(load(fn, "args")), args), merged)


_PLACEHOLDER = getattr(functools, "Placeholder", ABSENT)
"""Stands for an argument of the call among those of a partial; from Python 3.14 on."""


def _filled(held: list[Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the positional arguments of a partial's function: those of a call take the places left for them."""
    count = sum(value is _PLACEHOLDER for value in held)
    if len(args) < count:
        missing = f"expected at least {count}, got {len(args)}"
        raise TypeError(f"missing positional arguments in 'partial' call; {missing}")
    rest = iter(args)
    return (*(next(rest) if value is _PLACEHOLDER else value for value in held), *rest)


GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
"""C classes whose instances read or call an attribute or item of their argument."""


def _get(interp: InterpreterAPI, getter: Any, obj: Any) -> Any:
    """``getter(obj)`` for a getter of :mod:`operator`."""
    maker, given = getter.__reduce__()
    if type(getter) is operator.methodcaller:
        name, keywords = given[0], {}
        if type(maker) is functools.partial:
            name, keywords = maker.args[0], maker.keywords
            given = (name, *given)
        return interp.call(interp.getattr(obj, name), given[1:], keywords)
    if type(getter) is operator.itemgetter:
        found = [interp.getitem(obj, key) for key in given]
    else:
        found = []
        for path in given:
            value = obj
            for name in path.split("."):
                value = interp.getattr(value, name)
            found.append(value)
    return found[0] if len(found) == 1 else tuple(found)


ANSWERED: set[Any] = set()
"""C functions whose interceptors return values of the trace."""


def is_python_callable(value: Any) -> bool:
    """Returns True for an object whose class defines ``__call__`` in Python."""
    return type(type.__getattribute__(type(value), "__call__")) is types.FunctionType if callable(value) else False


def runs_python(fn: Any) -> bool:
    """Returns True for Python functions, bound methods and partials of those, and functions in :data:`ANSWERED`."""
    kind = type(fn)
    while True:
        if kind is types.FunctionType:
            return True
        if kind is types.MethodType:
            fn = fn.__func__
        elif kind is functools.partial:
            fn = fn.func
        else:
            return kind is types.BuiltinFunctionType and fn in ANSWERED
        kind = type(fn)
