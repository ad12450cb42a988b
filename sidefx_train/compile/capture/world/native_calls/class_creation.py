"""Classes created in a step, and attributes of outside functions and classes.

``type.__new__`` calls ``__set_name__`` of values in the namespace and ``__init_subclass__`` of the bases from C. A
capture makes both re-enter the interpreter; for the latter, the base that defines it has a substitute during the call,
which calls the original in other threads. A class created in a step cannot leave it, since a replay does not create a
new one.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.sentinels import ABSENT, NATIVE_CODE
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


def makes_class(fn: Any, args: tuple[Any, ...]) -> bool:
    """Returns True if calling the C callable ``fn`` creates a class."""
    if fn is type.__new__:
        return len(args) == 4
    return safe_isinstance(fn, type) and issubclass(fn, type) and len(args) == 3


def make_class(world: CaptureContext, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> type:
    """Creates a class like ``type.__new__``, with the Python code in its namespace and its bases interpreted."""
    *front, namespace = args
    bases = front[-1]
    space = {name: _announced(world, value) for name, value in dict.items(namespace)}
    hooks = [base for base in _bases_and_theirs(bases) if "__init_subclass__" in vars(base)]
    for base in bases:
        if safe_isinstance(base, type):
            world.interp.world.class_attr(base, "__init_subclass__")
    swapped: list[tuple[type, Any]] = []
    for base in hooks:
        hook = vars(base)["__init_subclass__"]
        if not safe_isinstance(hook, classmethod) or not safe_isinstance(hook.__func__, types.FunctionType):
            continue
        if is_library(base.__module__):
            continue
        swapped.append((base, hook))
    try:
        for base, hook in swapped:
            type.__setattr__(base, "__init_subclass__", _reentering(world, hook.__func__, swapped))
        made: type = world.guarded(fn, (*front, space), kwargs)
    finally:
        for base, hook in swapped:
            type.__setattr__(base, "__init_subclass__", hook)
    world.new_classes[id(made)] = made
    return made


def _bases_and_theirs(bases: tuple[Any, ...]) -> list[type]:
    found: dict[type, None] = {}
    for base in bases:
        if safe_isinstance(base, type):
            found.update(dict.fromkeys(type.__getattribute__(base, "__mro__")))
    return list(found)


def _reentering(world: CaptureContext, fn: types.FunctionType, swapped: list[tuple[type, Any]]) -> Any:
    thread = threading.get_ident()

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        if threading.get_ident() != thread:
            fn(cls, **kwargs)
            return
        world.new_classes[id(cls)] = cls
        for base, hook in swapped:  # only C code needs the substitutes
            type.__setattr__(base, "__init_subclass__", hook)
        world.interp.call(fn, (cls,), kwargs)

    NATIVE_CODE.add(id(__init_subclass__.__code__))
    return classmethod(__init_subclass__)


def _announced(world: CaptureContext, value: Any) -> Any:
    """Returns ``value``, or its placeholder in the namespace until its ``__set_name__`` has been interpreted."""
    cls = type(value)
    if cls is types.FunctionType or is_library(cls.__module__):
        return value
    hook = world.interp.world.class_attr(cls, "__set_name__")
    if not safe_isinstance(hook, types.FunctionType):
        return value
    return _Announced(world, value, hook)


class _Announced:
    def __init__(self, world: CaptureContext, value: Any, hook: Callable[..., Any]) -> None:
        self.world = world
        self.value = value
        self.hook = hook

    def __set_name__(self, owner: type, name: str) -> None:
        self.world.new_classes[id(owner)] = owner
        type.__setattr__(owner, name, self.value)
        self.world.interp.call(self.hook, (self.value, owner, name), {})


def set_class_attribute(world: Any, cls: type, name: str, value: Any) -> None:
    """Stores a class attribute: directly if the step created the class, else as an effect."""
    if id(cls) in world.new_classes:
        type.__setattr__(cls, name, value)
        return
    if safe_isinstance(vars(type).get(name), (types.GetSetDescriptorType, types.MemberDescriptorType)):
        world.heap.refuse("SFX111", f"sets {name} of the class {cls.__qualname__}")
    world.class_entry(cls, name)
    world.class_writes[cls, name] = value


def delete_class_attribute(world: Any, cls: type, name: str) -> None:
    """Deletes an attribute of a class created in the step."""
    if id(cls) in world.new_classes:
        type.__delattr__(cls, name)
        return
    if world.class_entry(cls, name) is ABSENT:
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
    world.heap.refuse("SFX111", f"deletes the attribute {name!r} of the class {cls.__qualname__}")


def set_function_field(world: Any, fn: types.FunctionType, name: str, value: Any) -> None:
    """Stores a field that every function has (``__name__``, ``__defaults__``...)."""
    if id(fn) in world.new_functions:
        object.__setattr__(fn, name, value)
        return
    now = getattr(fn, name)
    if now is not value and not (type(now) is type(value) is str and now == value):
        world.heap.refuse("SFX111", f"sets {name} of the function {fn.__qualname__}")
