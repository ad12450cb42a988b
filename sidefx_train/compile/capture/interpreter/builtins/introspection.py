"""Substitutes for builtins that run Python code of their arguments or inspect classes and frames.

``find`` returns the substitute of a callable; each has the signature ``(interp, args, kwargs)``. If the arguments need
no special treatment, a substitute calls the builtin natively through the world.
"""

from __future__ import annotations

import _abc
import abc
import builtins
import functools
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.builtins import copying, mappings, operator_functions
from sidefx_train.compile.capture.interpreter.builtins.registry import (
    CLASS_METHODS,
    METHOD_NAMES,
    SUBSTITUTES,
    Substitute,
    register,
    register_method,
)
from sidefx_train.compile.capture.interpreter.frame import NULL
from sidefx_train.compile.capture.interpreter.frame_objects import frame_object_stack, names_in
from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.capture.interpreter.object_model import (
    attributes,
    formatting,
    function_calls,
    iteration,
    operators,
)
from sidefx_train.compile.capture.interpreter.object_model.attributes import call_special, is_static, special
from sidefx_train.compile.capture.interpreter.object_model.class_statement import build_class
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


_MISSING: Any = object()


def find(interp: InterpreterAPI, fn: Any) -> Substitute | None:
    """Returns the substitute of ``fn``, or ``None``."""
    found = SUBSTITUTES.get(id(fn))
    if found is None and type(fn) is types.BuiltinFunctionType:
        owner = fn.__self__
        kind = type(owner)
        if issubclass(kind, type):
            found = CLASS_METHODS.get(fn) if fn.__name__ in _CLASS_METHOD_NAMES else None
            return found or mappings.class_method(fn, owner)
        if fn.__name__ in METHOD_NAMES and owner is not None and kind is not types.ModuleType:
            return mappings.bound_method(fn, owner)
    return found


def keeps_callables(fn: Any) -> bool:
    """Returns True for C callables that store or inspect a callable argument but never call it."""
    if id(fn) in _KEEPS:
        return True
    if type(fn) is types.BuiltinFunctionType:
        owner = fn.__self__
        if safe_isinstance(owner, type):
            return issubclass(owner, operator_functions.CONTAINERS)
        return safe_isinstance(owner, operator_functions.CONTAINERS) and fn.__name__ != "sort"
    if type(fn) in (types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType):
        if fn.__name__ == "__get__":
            return True
        return issubclass(fn.__objclass__, operator_functions.CONTAINERS) and fn.__name__ != "sort"
    return safe_isinstance(fn, type) and issubclass(fn, (BaseException, *operator_functions.CONTAINERS))


def call_method_wrapper(interp: InterpreterAPI, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a bound slot wrapper (``super().__setattr__`` of a C base) like the slot wrapper itself, if that is
    known."""
    owner = fn.__objclass__
    if owner is functools.partial and fn.__name__ == "__call__":  # do not call an override of the class again
        return function_calls.call_partial(interp, fn.__self__, args, kwargs)
    wrapper = vars(owner).get(fn.__name__, _MISSING)
    if id(wrapper) in SUBSTITUTES:
        return interp.call(wrapper, (fn.__self__, *args), kwargs)
    return interp.native(fn, args, kwargs)


def _is_name(interp: InterpreterAPI, name: Any) -> bool:
    """Returns True for a string; C code hashes and compares it if it is of a subclass."""
    if type(name) is str:
        return True
    if not safe_isinstance(name, str):
        return False
    interp.world.as_key(name)
    return True


@register(getattr)
def _getattr(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or not 2 <= len(args) <= 3 or not _is_name(interp, args[1]):
        return interp.native(getattr, args, kwargs)
    if len(args) == 2:
        return interp.getattr(args[0], args[1])
    try:
        return interp.getattr(args[0], args[1])
    except AttributeError:
        interp.in_flight = None
        return args[2]


@register(hasattr)
def _hasattr(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or not _is_name(interp, args[1]):
        return interp.native(hasattr, args, kwargs)
    try:
        interp.getattr(args[0], args[1])
    except AttributeError:
        interp.in_flight = None
        return False
    return True


@register(setattr)
def _setattr(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3 or not _is_name(interp, args[1]):
        return interp.native(setattr, args, kwargs)
    return interp.setattr(*args)


@register(delattr)
def _delattr(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or not _is_name(interp, args[1]):
        return interp.native(delattr, args, kwargs)
    return interp.delattr(*args)


@register(object.__getattribute__)
def _object_getattribute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or issubclass(type(args[0]), (type, types.ModuleType)) or type(args[1]) is not str:
        return interp.native(object.__getattribute__, args, kwargs)
    found = interp.world.override_getattr(args[0], args[1])
    return found if found is not ABSENT else attributes.generic_or_raise(interp, args[0], args[1])


@register(type.__getattribute__)
def _type_getattribute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or not safe_isinstance(args[0], type) or not safe_isinstance(args[1], str):
        return interp.native(type.__getattribute__, args, kwargs)
    return attributes.class_generic(interp, args[0], args[1])


def _of_another_kind(wrapper: Any, obj: Any) -> bool:
    """Returns True if ``wrapper`` does not apply to ``obj``: ``object.__setattr__`` to a class, or the reverse."""
    return issubclass(type(obj), type) != (wrapper.__objclass__ is type)


def _register_stores() -> None:
    def setter(wrapper: Any) -> Substitute:
        def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs or len(args) != 3 or _of_another_kind(wrapper, args[0]):
                return interp.native(wrapper, args, kwargs)
            if not interp.world.override_setattr(args[0], args[1], args[2]):
                attributes.generic_store(interp, args[0], args[1], args[2])
            return None

        return substitute

    def deleter(wrapper: Any) -> Substitute:
        def substitute(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs or len(args) != 2 or _of_another_kind(wrapper, args[0]):
                return interp.native(wrapper, args, kwargs)
            if not interp.world.override_delattr(args[0], args[1]):
                attributes.generic_delete(interp, args[0], args[1])
            return None

        return substitute

    for cls in (object, type):
        register(vars(cls)["__setattr__"])(setter(vars(cls)["__setattr__"]))
        register(vars(cls)["__delattr__"])(deleter(vars(cls)["__delattr__"]))


_register_stores()


@register(vars(type)["__call__"])
def _type_call(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args or not safe_isinstance(args[0], type):
        return interp.native(vars(type)["__call__"], args, kwargs)
    return function_calls.type_call(interp, args[0], args[1:], kwargs)


@register(object.__ne__)
def _object_ne(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return interp.native(object.__ne__, args, kwargs)
    return operators.object_ne(interp, args[0], args[1])


@register(object.__str__)
def _object_str(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 1:
        return interp.native(object.__str__, args, kwargs)
    return formatting.to_repr(interp, args[0])


def _call_self(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return interp.call(args[0], args[1:], kwargs)


for _cls in (types.FunctionType, types.MethodType, functools.partial):
    register(vars(_cls)["__call__"])(_call_self)


@register(vars(property)["__get__"])
def _property_get(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    prop = args[0] if args else None
    if not kwargs and len(args) in (2, 3) and safe_isinstance(prop, property) and args[1] is not None and prop.fget:
        return interp.call(prop.fget, (args[1],), {})
    return interp.native(vars(property)["__get__"], args, kwargs)


@register(vars(property)["__set__"])
def _property_set(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    prop = args[0] if args else None
    if not kwargs and len(args) == 3 and safe_isinstance(prop, property) and prop.fset:
        interp.call(prop.fset, (args[1], args[2]), {})
        return None
    return interp.native(vars(property)["__set__"], args, kwargs)


@register(super)
def _super(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 2 and not kwargs:
        cls, first = args
    elif args or kwargs:
        return interp.native(super, args, kwargs)
    else:
        cls, first = zero_arg_super(interp)
    if safe_isinstance(cls, type) and not safe_isinstance(first, (cls, type)):
        shown = interp.type_of(first)
        if shown is not type(first) and attributes.is_subtype(shown, cls):
            return attributes.ShownSuper(cls, first)
    return interp.native(super, args, kwargs) if args else super(cls, first)


def zero_arg_super(interp: InterpreterAPI) -> tuple[Any, Any]:
    """Returns the class and the instance that ``super()`` means in the current frame."""
    frame = interp.current_frame
    if frame is None:
        raise RuntimeError("super(): no current frame")
    code = frame.code
    if not code.co_argcount and not code.co_flags & 4:
        raise RuntimeError("super(): no arguments")
    first = frame.locals[0]
    if safe_isinstance(first, types.CellType) and code.co_varnames[0] in code.co_cellvars:
        first = interp.world.load_cell(first)
    if first is NULL or first is ABSENT:
        raise RuntimeError("super(): arg[0] deleted")
    if "__class__" not in code.co_freevars:
        raise RuntimeError("super(): __class__ cell not found")
    cls = interp.world.load_cell(frame.locals[frame.info.slots.index("__class__")])
    if cls is ABSENT:
        raise RuntimeError("super(): empty __class__ cell")
    return cls, first


def _shown_type(interp: InterpreterAPI, obj: Any) -> type:
    return types.GeneratorType if type(obj) is InterpretedGenerator else interp.type_of(obj)


@register(type)
def _type(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 1 and not kwargs:
        return _shown_type(interp, args[0])
    return interp.native(type, _with_module(interp, args, 2), kwargs)


def _with_module(interp: InterpreterAPI, args: tuple[Any, ...], position: int) -> tuple[Any, ...]:
    """Adds the program's module to a new class's namespace: ``type`` would read it from the native frame."""
    frame = interp.current_frame
    if frame is None or len(args) <= position or not safe_isinstance(args[position], dict):
        return args
    module = frame.globals.get("__name__")
    if module is None or "__module__" in args[position]:
        return args
    return (*args[:position], {**args[position], "__module__": module}, *args[position + 1 :])


@register(type.__new__)
def _type_new(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return interp.native(type.__new__, _with_module(interp, args, 3), kwargs)


@register(builtins.isinstance)
def _isinstance(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return interp.native(builtins.isinstance, args, kwargs)
    return is_instance(interp, args[0], args[1])


def is_instance(interp: InterpreterAPI, obj: Any, cls: Any) -> bool:
    """``isinstance(obj, cls)`` with the classes that the program sees."""
    seen = _shown_type(interp, obj)
    if seen is cls:
        return True
    if type(cls) is tuple:
        return any(is_instance(interp, obj, each) for each in cls)
    if type(cls) is types.UnionType:
        return any(is_instance(interp, obj, each) for each in cls.__args__)
    if issubclass(type(cls), type):
        hook = special(interp, cls, "__instancecheck__")
        if hook is ABSENT:
            return _default_instance(interp, obj, seen, cls)
        if not _is_abc_hook(hook):
            return operators.truth(interp, call_special(interp, hook, cls, (obj,)))
        if seen is not type(obj):
            return bool(_issubclass(interp, (seen, cls), {}))
    else:
        hook = special(interp, cls, "__instancecheck__")
        if hook is not ABSENT and type(cls).__module__ != "typing":
            return operators.truth(interp, call_special(interp, hook, cls, (obj,)))
    return interp.native(builtins.isinstance, (obj, cls), {})


def _default_instance(interp: InterpreterAPI, obj: Any, seen: type, cls: type) -> bool:
    if attributes.is_subtype(seen, cls):
        return True
    if type(obj) in weakref.ProxyTypes:  # an attribute of a proxy is that of its referent
        return attributes.is_subtype(interp.getattr(obj, "__class__"), cls)
    if is_static(type(obj)):
        return False
    claim = interp.world.class_attr(seen, "__class__")
    if type(claim) is types.GetSetDescriptorType and special(interp, obj, "__getattribute__") is ABSENT:
        return False
    claimed = interp.getattr(obj, "__class__")
    return safe_isinstance(claimed, type) and claimed is not seen and attributes.is_subtype(claimed, cls)


def _is_abc_hook(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == "abc"


@register(vars(type)["__instancecheck__"])
def _type_instancecheck(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or not safe_isinstance(args[0], type):
        return interp.native(vars(type)["__instancecheck__"], args, kwargs)
    return _default_instance(interp, args[1], _shown_type(interp, args[1]), args[0])


@register(_abc._abc_instancecheck)
def _abc_instancecheck(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # The Python method is called directly: typing reads the module of its caller.
    cls, obj = args
    seen = _shown_type(interp, obj)
    if seen is type(obj):
        return interp.native(abc.ABCMeta.__instancecheck__, (cls, obj), {})
    return interp.native(abc.ABCMeta.__subclasscheck__, (cls, seen), {})


@register(_abc._abc_subclasscheck)
def _abc_subclasscheck(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return interp.native(abc.ABCMeta.__subclasscheck__, args, kwargs)


@register(_abc._abc_register)
def _abc_register(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return interp.native(abc.ABCMeta.register, args, kwargs)


@register(issubclass)
def _issubclass(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not kwargs and len(args) == 2 and issubclass(type(args[1]), type):
        hook = special(interp, args[1], "__subclasscheck__")
        if hook is not ABSENT and not _is_abc_hook(hook):
            return operators.truth(interp, call_special(interp, hook, args[1], (args[0],)))
    if not kwargs and len(args) == 2 and type(args[1]) is tuple:
        return any(_issubclass(interp, (args[0], each), {}) for each in args[1])
    return interp.native(issubclass, args, kwargs)


@register(callable)
def _callable(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 1 or interp.type_of(args[0]) is type(args[0]):
        return interp.native(callable, args, kwargs)
    return interp.world.class_attr(interp.type_of(args[0]), "__call__") is not ABSENT


@register(vars)
def _vars(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args and not kwargs:
        return _locals(interp, args, kwargs)
    if kwargs or len(args) != 1:
        return interp.native(vars, args, kwargs)
    found = _getattr(interp, (args[0], "__dict__", ABSENT), {})
    if found is ABSENT:
        raise TypeError("vars() argument must have __dict__ attribute")
    return found


@register(locals)
def _locals(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args or kwargs:
        return interp.native(locals, args, kwargs)
    return local_names(interp)


def local_names(interp: InterpreterAPI) -> Any:
    """Returns what ``locals()`` returns in the current frame."""
    frame = interp.current_frame
    if frame is None:
        raise RuntimeError("locals() outside any interpreted frame")
    return names_in(interp, frame)


@register(globals)
def _globals(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args or kwargs or interp.current_frame is None:
        return interp.native(globals, args, kwargs)
    return interp.world.globals_dict(interp.current_frame.globals)


@register(dir)
def _dir(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args and not kwargs:
        space = local_names(interp)
        if type(space) is not dict:
            space = interp.iterate(interp.call(interp.getattr(space, "keys"), (), {}))
        return sorted(space)
    if type(args[0]) is InterpretedGenerator:
        return dir(types.GeneratorType)
    method = special(interp, args[0], "__dir__") if len(args) == 1 else ABSENT
    if method is not ABSENT:
        return sorted(iteration.to_list(interp, call_special(interp, method, args[0], ())))
    return interp.native(dir, args, kwargs)


@register(eval)
def _eval(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0] if args else None
    if safe_isinstance(source, str):
        source = compile(source.strip(" \t"), "<string>", "eval", dont_inherit=True)
    if not safe_isinstance(source, types.CodeType) or source.co_freevars:
        return interp.native(eval, args, kwargs)
    return operator_functions.run_code(interp, source, args[1:], kwargs, local_names)


@register(exec)
def _exec(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0] if args else None
    if safe_isinstance(source, str):
        source = compile(source, "<string>", "exec", dont_inherit=True)
    if not safe_isinstance(source, types.CodeType) or source.co_freevars or "closure" in kwargs:
        return interp.native(exec, args, kwargs)
    operator_functions.run_code(interp, source, args[1:], kwargs, local_names)
    return None


@register(sys.exc_info)
def _exc_info(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    error = interp.handled.topmost()
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


@register(sys.exception)
def _exception(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return interp.handled.topmost()


@register(sys._getframe)
def _getframe(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    frame, depth = interp.current_frame, args[0] if args else 0
    while frame is not None and depth > 0:
        frame, depth = frame.back, depth - 1
    if frame is None:
        return sys._getframe(1)
    return frame_object_stack(interp, frame)


if hasattr(sys, "_getframemodulename"):

    @register(sys._getframemodulename)
    def _getframemodulename(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _getframe(interp, args or tuple(kwargs.values()), {}).f_globals.get("__name__")


register(builtins.__build_class__)(build_class)
register_method(object.__reduce_ex__)(copying.reduce)
_CLASS_METHOD_NAMES = frozenset(fn.__name__ for fn in CLASS_METHODS)
_KEEPS = {id(fn) for fn in operator_functions.KEEPS}
