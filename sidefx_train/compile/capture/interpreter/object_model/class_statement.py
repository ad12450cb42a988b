"""Class statements: metaclass, namespace, body, class object."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


def build_class(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``__build_class__(body, name, *bases, metaclass=None, **kwargs)``."""
    body, name, *listed = args
    bases = resolve_bases(interp, tuple(listed))
    kwargs = dict(kwargs)
    meta = kwargs.pop("metaclass", ABSENT)
    if meta is ABSENT:
        meta = interp.type_of(bases[0]) if bases else type
    if safe_isinstance(meta, type):
        meta = _winner(interp, meta, bases)
    namespace: Any = {}
    prepare = interp.getattr_or(meta, "__prepare__", ABSENT)
    if prepare is not ABSENT:
        namespace = interp.call(prepare, (name, bases), kwargs)
        if interp.world.class_attr(interp.type_of(namespace), "__getitem__") is ABSENT:
            shown = meta.__name__ if safe_isinstance(meta, type) else "<metaclass>"
            raise TypeError(f"{shown}.__prepare__() must return a mapping, not {type(namespace).__name__}")
    cell = interp.run_body(body.__code__, body.__globals__, body.__closure__, namespace)
    if bases != tuple(listed):
        interp.setitem(namespace, "__orig_bases__", tuple(listed))
    cls = interp.call(meta, (name, bases, namespace), kwargs)
    if safe_isinstance(cell, types.CellType) and safe_isinstance(cls, type):
        inside = interp.world.load_cell(cell)
        if inside is ABSENT:
            raise RuntimeError(
                f"__class__ not set defining {name!r} as {cls!r}. Was __classcell__ propagated to type.__new__?"
            )
        if inside is not cls:
            raise TypeError(f"__class__ set to {inside!r} defining {name!r} as {cls!r}")
        interp.world.store_cell(cell, cls)
    return cls


def resolve_bases(interp: InterpreterAPI, bases: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replaces bases that are not classes by the result of their ``__mro_entries__``."""
    result: list[Any] = []
    for base in bases:
        if safe_isinstance(base, type):
            result.append(base)
            continue
        entries = interp.getattr_or(base, "__mro_entries__", ABSENT)
        if entries is ABSENT:
            result.append(base)
            continue
        found = interp.call(entries, (bases,), {})
        if not safe_isinstance(found, tuple):
            raise TypeError("__mro_entries__ must return a tuple")
        result.extend(found)
    return tuple(result)


def _winner(interp: InterpreterAPI, meta: type, bases: tuple[Any, ...]) -> type:
    """Returns the most derived metaclass."""
    for base in bases:
        kind = interp.type_of(base)
        if issubclass(meta, kind):
            continue
        if not issubclass(kind, meta):
            raise TypeError(
                "metaclass conflict: the metaclass of a derived class must be a (non-strict) subclass of the "
                "metaclasses of all its bases"
            )
        meta = kind
    return meta
