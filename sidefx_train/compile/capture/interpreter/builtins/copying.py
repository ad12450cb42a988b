"""The substitute for ``object.__reduce_ex__``, by which ``copy`` takes an object apart."""

from __future__ import annotations

import copyreg
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.object_model import iteration
from sidefx_train.compile.capture.interpreter.object_model.attributes import special
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI

_CALLED = ("__getstate__", "__getnewargs__", "__getnewargs_ex__", "items", "__iter__")


def reduce(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``object.__reduce_ex__(obj, protocol)``."""
    obj = args[0] if args else None
    if kwargs or len(args) != 2:
        return interp.native(object.__reduce_ex__, args, kwargs)
    if special(interp, obj, "__reduce__") is not ABSENT:
        return interp.call(interp.getattr(obj, "__reduce__"), (), {})
    own = any(special(interp, obj, name) is not ABSENT for name in _CALLED)
    if not own or args[1] < 2 or interp.world.class_attr(interp.type_of(obj), "__reduce__") is not object.__reduce__:
        return interp.native(object.__reduce_ex__, args, kwargs)
    return _taken_apart(interp, obj)


def _taken_apart(interp: InterpreterAPI, obj: Any) -> tuple[Any, ...]:
    """Returns what ``object.__reduce_ex__(obj, 4)`` does, with the methods of the program interpreted."""
    cls = interp.type_of(obj)
    given: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if special(interp, obj, "__getnewargs_ex__") is not ABSENT:
        given, named = interp.call(interp.getattr(obj, "__getnewargs_ex__"), (), {})
    elif special(interp, obj, "__getnewargs__") is not ABSENT:
        given = interp.call(interp.getattr(obj, "__getnewargs__"), (), {})
    state = interp.call(interp.getattr(obj, "__getstate__"), (), {})
    items = iteration.get_iter(interp, obj) if safe_isinstance(obj, list) else None
    pairs = None
    if safe_isinstance(obj, dict):
        pairs = iteration.get_iter(interp, interp.call(interp.getattr(obj, "items"), (), {}))
    if named:
        return copyreg.__newobj_ex__, (cls, given, named), state, items, pairs  # type: ignore[attr-defined]
    return copyreg.__newobj__, (cls, *given), state, items, pairs  # type: ignore[attr-defined]
