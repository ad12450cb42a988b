"""The attribute protocol: instances, classes, modules and ``super`` objects.

Order of a load: ``world.override_getattr``, a Python-level ``__getattribute__``, data descriptors, the instance's own
entry, other descriptors, ``__getattr__``. Python-level descriptors and hooks are interpreted; ``world.native_getattr``
handles C-level ones.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.frame_objects import of_frame
from sidefx_train.compile.capture.interpreter.world import LOCAL
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import HEAP_TYPE, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


_C_DATA = (types.MemberDescriptorType, types.GetSetDescriptorType)
_C_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_SLOT = types.WrapperDescriptorType
_BUILTIN = types.BuiltinFunctionType
_CYTHON = "cython_function_or_method"
"""Functions of modules that Cython compiles; each version of Cython has its own class."""
_FUNCTION = types.FunctionType
_object_getattribute = object.__getattribute__
_type_lookup = type.__getattribute__
_SPACES = (types.SimpleNamespace, LOCAL)
_GENERIC = frozenset(
    {
        dict, list, tuple, set, frozenset, int, float, complex, str, bytes, bytearray, BaseException, OrderedDict,
        defaultdict, deque, property, staticmethod, classmethod, functools.partial, types.SimpleNamespace, LOCAL,
    }
)  # fmt: skip
"""C types whose ``__getattribute__`` and ``__setattr__`` are the generic ones under another name.

Those of ``threading.local`` use the ``__dict__`` of the running thread.
"""
_STATIC: dict[type, bool] = {}


def is_static(cls: type) -> bool:
    """Returns True if ``cls`` and all its bases are static C types, which Python code cannot change."""
    if cls.__flags__ & HEAP_TYPE:  # never cached: a class that a step creates must be collectable
        return False
    known = _STATIC.get(cls)
    if known is None:
        known = _STATIC[cls] = not any(base.__flags__ & HEAP_TYPE for base in _type_lookup(cls, "__mro__"))
    return known


def _is_generic(wrapper: Any) -> bool:
    """Returns True for ``__getattribute__`` of a type in ``_GENERIC``, found under that name."""
    return type(wrapper) is _SLOT and wrapper.__objclass__ in _GENERIC and wrapper.__name__ == "__getattribute__"


def _stores_plainly(wrapper: Any) -> bool:
    if type(wrapper) is not _SLOT or wrapper.__name__ not in ("__setattr__", "__delattr__"):
        return False
    return wrapper.__objclass__ in _GENERIC or wrapper.__objclass__ is types.ModuleType


def is_c_level(attr: Any) -> bool:
    """Returns True for members of C types' namespaces: calling them runs no Python code of their own."""
    return safe_isinstance(attr, (_SLOT, types.MethodDescriptorType, _BUILTIN, types.ClassMethodDescriptorType))


def special(interp: InterpreterAPI, obj: Any, name: str) -> Any:
    """Returns the raw attribute ``name`` of the class of ``obj`` if it is Python-level, else :data:`ABSENT`."""
    cls = type(obj)
    if is_static(cls):
        return ABSENT
    found = interp.world.class_attr(interp.type_of(obj), name)
    return ABSENT if found is ABSENT or is_c_level(found) else found


def is_subtype(cls: type, base: type) -> bool:
    """Subclass test along the MRO, without ``__subclasscheck__``."""
    return base in _type_lookup(cls, "__mro__")


def call_special(
    interp: InterpreterAPI, attr: Any, obj: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Any:
    """Calls a raw class attribute as a method of ``obj``."""
    if type(attr) is _FUNCTION:
        return interp.call(attr, (obj, *args), kwargs or {})
    return interp.call(bind(interp, attr, obj, interp.type_of(obj)), args, kwargs or {})


def bind(interp: InterpreterAPI, attr: Any, obj: Any, cls: type) -> Any:
    """``attr.__get__(obj, cls)`` if ``attr`` is a descriptor, else ``attr``; ``obj=None`` for access on the class."""
    kind = type(attr)
    if kind is _FUNCTION:
        return attr if obj is None else types.MethodType(attr, obj)
    if kind is staticmethod:
        return attr.__func__
    if kind is classmethod:
        return bind_classmethod(interp, attr, cls)
    if kind is property:
        return attr if obj is None else _property_get(interp, attr, obj)
    if is_static(kind) and not hasattr(kind, "__get__"):
        return attr
    getter = interp.world.class_attr(kind, "__get__")
    if getter is ABSENT:
        return attr
    if is_c_level(getter):
        if kind in _C_METHODS or kind in _C_DATA or kind is _BUILTIN or kind.__name__ == _CYTHON:
            return attr.__get__(obj, cls)
        if kind is types.MethodType:
            return attr
        if safe_isinstance(attr, property) and obj is not None:
            return _property_get(interp, attr, obj)
        if safe_isinstance(attr, staticmethod):
            return attr.__func__
        if safe_isinstance(attr, classmethod):
            return bind_classmethod(interp, attr, cls)
        return interp.native(getter, (attr, obj, cls), {})
    return call_special(interp, getter, attr, (obj, cls))


def bind_classmethod(interp: InterpreterAPI, attr: Any, cls: type) -> Any:
    """Binds a classmethod's function to ``cls``; other descriptors are bound first, as 3.11 and 3.12 do."""
    inner = attr.__func__
    if type(inner) is _FUNCTION or not hasattr(type(inner), "__get__"):
        return types.MethodType(inner, cls)
    return attr.__get__(None, cls) if not safe_isinstance(inner, property) else bind(interp, inner, cls, type(cls))


def _property_get(interp: InterpreterAPI, attr: property, obj: Any) -> Any:
    if attr.fget is None:
        return attr.__get__(obj)  # raises CPython's own message
    return interp.call(attr.fget, (obj,), {})


def is_data(interp: InterpreterAPI, attr: Any) -> bool:
    """Returns True if ``attr`` is a data descriptor: its class has ``__set__`` or ``__delete__``."""
    kind = type(attr)
    if kind is _FUNCTION:
        return False
    if kind is property or kind in _C_DATA:
        return True
    if is_static(kind):
        return hasattr(kind, "__set__")
    world = interp.world
    return world.class_attr(kind, "__set__") is not ABSENT or world.class_attr(kind, "__delete__") is not ABSENT


def load(interp: InterpreterAPI, obj: Any, name: str) -> Any:
    """``getattr(obj, name)``.

    Raises:
        AttributeError: as in CPython.
    """
    try:
        return _load(interp, obj, name)
    except AttributeError as error:
        if error.name is None and error.obj is None:
            error.name, error.obj = name, obj
        raise


def _load(interp: InterpreterAPI, obj: Any, name: str) -> Any:
    world = interp.world
    found = world.override_getattr(obj, name)
    if found is not ABSENT:
        return found
    cls = interp.type_of(obj)
    if cls is ShownSuper:
        return super_attribute(interp, obj.cls, obj.instance, interp.type_of(obj.instance), name, obj)
    if cls is types.FrameType and id(obj) in interp.substitute_frames:
        found = of_frame(interp, interp.substitute_frames[id(obj)][1], name)
        if found is not ABSENT:
            return found
    getter = _type_lookup(cls, "__getattribute__")
    if getter is _object_getattribute or (_is_generic(getter) and (cls in _SPACES or not is_static(cls))):
        missing = None
        found = generic(interp, obj, cls, name)
    elif type(getter) is _SLOT:
        if getter is type.__getattribute__:
            return _load_class(interp, obj, cls, name)
        if getter is types.ModuleType.__getattribute__:
            return _load_module(interp, obj, cls, name)
        if cls is super:
            return _load_super(interp, obj, name)
        hook = special(interp, obj, "__getattr__")
        if hook is ABSENT:
            return world.native_getattr(obj, name)
        try:
            return world.native_getattr(obj, name)
        except AttributeError as error:
            missing = error
    else:
        missing = None
        try:
            getter = world.class_attr(cls, "__getattribute__")
            return call_special(interp, getter, obj, (name,))
        except AttributeError as error:
            missing = error
            interp.in_flight = None
    if found is not ABSENT:
        return found
    hook = world.class_attr(cls, "__getattr__")
    if hook is ABSENT:
        raise missing if missing is not None else _no_attribute(cls, obj, name)
    return call_special(interp, hook, obj, (name,))


def generic(interp: InterpreterAPI, obj: Any, cls: type, name: str) -> Any:
    """``object.__getattribute__``; returns :data:`ABSENT` instead of raising for a missing name.

    As in CPython, an ``AttributeError`` of a descriptor counts as missing if the class has ``__getattr__``.
    """
    world = interp.world
    attr = world.class_attr(cls, name)
    if attr is ABSENT:
        return world.instance_attr(obj, name)
    kind = type(attr)
    if kind is _FUNCTION:
        own = world.instance_attr(obj, name)
        return types.MethodType(attr, obj) if own is ABSENT else own
    if kind in _C_DATA:
        if name == "__class__" and attr.__objclass__ is object:
            return cls
        return _guarded(interp, cls, lambda: world.native_getattr(obj, name))
    if kind is property:
        return _guarded(interp, cls, lambda: _property_get(interp, attr, obj))
    if is_data(interp, attr) and world.class_attr(kind, "__get__") is not ABSENT:
        return _guarded(interp, cls, lambda: bind(interp, attr, obj, cls))
    own = world.instance_attr(obj, name)
    if own is not ABSENT:
        return own
    if kind in _C_METHODS:
        return attr.__get__(obj, cls) if not is_static(cls) else world.native_getattr(obj, name)
    return _guarded(interp, cls, lambda: bind(interp, attr, obj, cls))


def _guarded(interp: InterpreterAPI, cls: type, get: Any) -> Any:
    try:
        return get()
    except AttributeError:
        if interp.world.class_attr(cls, "__getattr__") is ABSENT:
            raise
        interp.in_flight = None
        return ABSENT


def generic_or_raise(interp: InterpreterAPI, obj: Any, name: str) -> Any:
    """``object.__getattribute__(obj, name)``."""
    cls = interp.type_of(obj)
    world = interp.world
    attr = world.class_attr(cls, name)
    if attr is not ABSENT and is_data(interp, attr):
        if type(attr) in _C_DATA:
            return cls if name == "__class__" else attr.__get__(obj, cls)
        if world.class_attr(type(attr), "__get__") is not ABSENT:
            return bind(interp, attr, obj, cls)
    found = world.instance_attr(obj, name)
    if found is not ABSENT:
        return found
    if attr is ABSENT:
        raise _no_attribute(cls, obj, name)
    return bind(interp, attr, obj, cls)


def _no_attribute(cls: type, obj: Any, name: str) -> AttributeError:
    return AttributeError(f"{shown_name(cls)!r} object has no attribute {name!r}", name=name, obj=obj)


def shown_name(cls: type) -> str:
    """Returns a class's name as its C code prints it in attribute errors."""
    return f"{cls.__module__}.{cls.__name__}" if cls in _SPACES else cls.__name__


def _load_class(interp: InterpreterAPI, obj: type, meta: type, name: str) -> Any:
    """``type.__getattribute__``, then the metaclass's ``__getattr__``."""
    try:
        return class_generic(interp, obj, name)
    except AttributeError:
        hook = interp.world.class_attr(meta, "__getattr__")
        if hook is ABSENT:
            raise
        interp.in_flight = None
    return call_special(interp, hook, obj, (name,))


def class_generic(interp: InterpreterAPI, obj: type, name: str) -> Any:
    """``type.__getattribute__(obj, name)``."""
    world = interp.world
    meta = interp.type_of(obj)
    of_meta = world.class_attr(meta, name)
    if of_meta is not ABSENT and is_data(interp, of_meta) and hasattr(type(of_meta), "__get__"):
        if type(of_meta) in _C_DATA:
            return meta if name == "__class__" else world.native_getattr(obj, name)
        return bind(interp, of_meta, obj, meta)
    attr = world.class_attr(obj, name)
    if attr is not ABSENT:
        return bind(interp, attr, None, obj)
    if of_meta is not ABSENT:
        return bind(interp, of_meta, obj, meta)
    raise AttributeError(f"type object {obj.__name__!r} has no attribute {name!r}", name=name, obj=obj)


def _load_module(interp: InterpreterAPI, obj: types.ModuleType, cls: type, name: str) -> Any:
    """Loads an attribute of a module: from its namespace, then by its own ``__getattr__``."""
    world = interp.world
    attr = world.class_attr(cls, name)
    if attr is not ABSENT and is_data(interp, attr):
        return world.native_getattr(obj, name) if type(attr) in _C_DATA else bind(interp, attr, obj, cls)
    found = world.instance_attr(obj, name)
    if found is not ABSENT:
        return found
    if attr is not ABSENT:
        return bind(interp, attr, obj, cls)
    hook = world.class_attr(cls, "__getattr__")
    if hook is not ABSENT:
        return call_special(interp, hook, obj, (name,))
    hook = world.instance_attr(obj, "__getattr__")
    if hook is not ABSENT:
        return interp.call(hook, (name,), {})
    return world.native_getattr(obj, name)  # raises CPython's own message


def _load_super(interp: InterpreterAPI, obj: super, name: str) -> Any:
    """Loads an attribute of a ``super`` object: looked up after its class in the MRO."""
    lookup = super.__getattribute__
    cls, instance = lookup(obj, "__thisclass__"), lookup(obj, "__self__")
    start = lookup(obj, "__self_class__")
    if start is None or name == "__class__":
        return lookup(obj, name)
    return super_attribute(interp, cls, instance, start, name, obj)


class ShownSuper:
    """``super(cls, instance)`` of an object that only the program sees as an instance of ``cls``."""

    def __init__(self, cls: type, instance: Any) -> None:
        self.cls, self.instance = cls, instance


def super_attribute(interp: InterpreterAPI, cls: type, instance: Any, start: type, name: str, shown: Any) -> Any:
    """``super(cls, instance).name``; the lookup follows the MRO of ``start``."""
    mro = _type_lookup(start, "__mro__")
    for base in mro[mro.index(cls) + 1 :]:
        attr = interp.world.instance_attr(base, name)
        if attr is not ABSENT:
            return bind(interp, attr, None if instance is start else instance, start)
    if safe_isinstance(shown, ShownSuper):
        raise AttributeError(f"'super' object has no attribute {name!r}")
    if shown is None:
        shown = super(cls, instance)
    return super.__getattribute__(shown, name)


def store(interp: InterpreterAPI, obj: Any, name: str, value: Any) -> None:
    """``setattr(obj, name, value)``."""
    world = interp.world
    if world.override_setattr(obj, name, value):
        return
    cls = interp.type_of(obj)
    setter = _type_lookup(cls, "__setattr__")
    if setter is object.__setattr__ or setter is type.__setattr__ or _stores_plainly(setter):
        generic_store(interp, obj, name, value)
    elif type(setter) is _SLOT:
        interp.native(setattr, (obj, name, value), {})
    else:
        call_special(interp, world.class_attr(cls, "__setattr__"), obj, (name, value))


def generic_store(interp: InterpreterAPI, obj: Any, name: str, value: Any) -> None:
    """``object.__setattr__`` and ``type.__setattr__``."""
    world = interp.world
    cls = interp.type_of(obj)
    attr = world.class_attr(cls, name)
    if attr is not ABSENT:
        if type(attr) is property:
            if attr.fset is None:
                attr.__set__(obj, value)  # raises CPython's own message
            interp.call(attr.fset, (obj, value), {})
            return
        if type(attr) not in _C_DATA and is_data(interp, attr):
            setter = world.class_attr(type(attr), "__set__")
            if setter is ABSENT:
                raise AttributeError("__set__")
            if not is_c_level(setter):
                call_special(interp, setter, attr, (obj, value))
            elif safe_isinstance(attr, property) and attr.fset is not None:
                interp.call(attr.fset, (obj, value), {})
            else:
                interp.native(setter, (attr, obj, value), {})
            return
    world.set_instance_attr(obj, name, value)


def delete(interp: InterpreterAPI, obj: Any, name: str) -> None:
    """``delattr(obj, name)``."""
    world = interp.world
    if world.override_delattr(obj, name):
        return
    cls = interp.type_of(obj)
    deleter = _type_lookup(cls, "__delattr__")
    if deleter is object.__delattr__ or deleter is type.__delattr__ or _stores_plainly(deleter):
        generic_delete(interp, obj, name)
    elif type(deleter) is _SLOT:
        interp.native(delattr, (obj, name), {})
    else:
        call_special(interp, world.class_attr(cls, "__delattr__"), obj, (name,))


def generic_delete(interp: InterpreterAPI, obj: Any, name: str) -> None:
    """``object.__delattr__`` and ``type.__delattr__``."""
    world = interp.world
    attr = world.class_attr(interp.type_of(obj), name)
    if attr is not ABSENT:
        if type(attr) is property:
            if attr.fdel is None:
                attr.__delete__(obj)  # raises CPython's own message
            interp.call(attr.fdel, (obj,), {})
            return
        if type(attr) not in _C_DATA and is_data(interp, attr):
            deleter = world.class_attr(type(attr), "__delete__")
            if deleter is ABSENT:
                raise AttributeError("__delete__")
            if is_c_level(deleter):
                interp.native(deleter, (attr, obj), {})
            else:
                call_special(interp, deleter, attr, (obj,))
            return
    world.del_instance_attr(obj, name)
