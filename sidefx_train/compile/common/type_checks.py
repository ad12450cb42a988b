"""``isinstance`` and ``getattr`` for values of the program.

The builtins ask the object for its ``__class__`` where the class alone does not say yes. That runs the program's
``__getattribute__`` or a property of that name, if its class has one, and the program could observe it. Modules that
inspect values of the program call the functions of this module instead.
"""

from __future__ import annotations

import types
import weakref
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_type_attribute = type.__getattribute__

HEAP_TYPE = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: the flag of classes that are not static in C."""

_WITHOUT_CLAIM: dict[int, weakref.ref[type]] = {}
"""Classes found to have no ``__class__`` of their own, by their ids: a dict of classes would run their ``__hash__``."""

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")


@overload
def safe_isinstance(value: object, classes: type[A]) -> TypeIs[A]: ...
@overload
def safe_isinstance(value: object, classes: tuple[type[A], type[B]]) -> TypeIs[A | B]: ...
@overload
def safe_isinstance(value: object, classes: tuple[type[A], type[B], type[C]]) -> TypeIs[A | B | C]: ...
@overload
def safe_isinstance(value: object, classes: tuple[type[A], type[B], type[C], type[D]]) -> TypeIs[A | B | C | D]: ...
@overload
def safe_isinstance(value: object, classes: Any) -> bool: ...
def safe_isinstance(value: Any, classes: Any) -> bool:
    """``isinstance(value, classes)`` that never runs a ``__getattribute__`` or ``__class__`` written in Python."""
    cls = type(value)
    if type(_type_attribute(cls, "__getattribute__")) is types.FunctionType:  # `hooks_loads`, without a call
        return issubclass(cls, classes)
    if id(cls) not in _WITHOUT_CLAIM and claims_a_class(cls):
        return issubclass(cls, classes)
    return isinstance(value, classes)


def claims_a_class(cls: type) -> bool:
    """Returns True if a class of the program defines the ``__class__`` of its instances, as mocks do."""
    if any("__class__" in _type_attribute(base, "__dict__") for base in _type_attribute(cls, "__mro__")[:-1]):
        return True
    number = id(cls)
    _WITHOUT_CLAIM[number] = weakref.ref(cls, lambda _: _WITHOUT_CLAIM.pop(number, None))
    return False


def hooks_loads(cls: type) -> bool:
    """Returns True if a class has a ``__getattribute__`` written in Python, of its own or inherited."""
    return type(_type_attribute(cls, "__getattribute__")) is types.FunctionType


set_field = BaseException.__setattr__
"""Sets a field of an exception, as CPython does: past a ``__setattr__`` of its class.

An exception of a frozen dataclass cannot be assigned to, and can be raised all the same.
"""


def attribute_of(value: Any, name: str, default: Any = None) -> Any:
    """``getattr(value, name, default)`` for attributes of callables.

    Does not run a ``__getattr__`` or ``__getattribute__`` of the program.
    """
    if type(value) in _PLAIN:
        return getattr(value, name, default)
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return default


def descriptor_of(method: Any) -> Any:
    """Returns the descriptor of a bound C method, or ``None`` if no class in the MRO has it.

    ``getattr(method.__self__, method.__name__)`` returns another method if a subclass overrides it: the name leads
    neither to a method from ``super()``, nor to one stored before.
    """
    owner = method.__self__
    if type(method) is types.MethodWrapperType:
        found = _type_attribute(method.__objclass__, "__dict__").get(method.__name__)
        return found if type(found) is types.WrapperDescriptorType else None
    for base in _type_attribute(type(owner), "__mro__"):
        found = _type_attribute(base, "__dict__").get(method.__name__)
        if type(found) is types.MethodDescriptorType and bound(found, owner) == method:
            return found
    return None


def class_method_of(method: types.BuiltinMethodType) -> Any:
    """Returns the descriptor of a class method of C code that is bound to a class, or ``None``."""
    owner: Any = method.__self__
    for base in _type_attribute(owner, "__mro__"):
        found = _type_attribute(base, "__dict__").get(method.__name__)
        if type(found) is types.ClassMethodDescriptorType and found.__get__(None, owner) == method:
            return found
    return None


def bound(descriptor: Any, owner: Any) -> Any:
    """Binds a C method to an object, with its class if the method requires it: CPython crashes otherwise."""
    return descriptor.__get__(owner, type(owner))


def instance_dict(value: Any) -> dict[str, Any]:
    """The instance ``__dict__``.

    Raises:
        AttributeError: there is none, or the class overrides it.
    """
    if shows_another(type(value)):
        raise AttributeError("__dict__")
    return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]


def shows_another(cls: type) -> bool:
    """Returns True if a class overrides the ``__dict__`` of its instances, for example by a property."""
    known = _SHOWS_ANOTHER.get(cls)
    if known is None:
        shown = next((vars(base)["__dict__"] for base in cls.__mro__ if "__dict__" in vars(base)), None)
        known = _SHOWS_ANOTHER[cls] = type(shown) not in _OF_C
    return known


_OF_C = (types.GetSetDescriptorType, types.MemberDescriptorType, types.NoneType)
_SHOWS_ANOTHER: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
_PLAIN = frozenset({types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType})


def deletes(cls: type) -> bool:
    """Returns True if instances of a class run Python code when finalized."""
    return any(
        safe_isinstance(vars(base).get("__del__"), types.FunctionType) for base in type.__getattribute__(cls, "__mro__")
    )
