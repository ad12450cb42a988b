"""The world of real objects: with it the interpreter is a plain (slow) Python interpreter.

Tests of the interpreter use it. A capture uses ``compile/capture/world/trace_world.py``, which works on shadows.
"""

from __future__ import annotations

import _thread
import builtins
import sys
import types
from collections.abc import Callable
from typing import Any

from sidefx_train.compile.capture.interpreter.frame import Frame
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.errors import Unsupported


def hidden_attr(obj: Any, name: str) -> Any:
    """Returns :meth:`World.instance_attr` of a C object that may have attributes without a visible ``__dict__``."""
    return object.__getattribute__(obj, name) if type(obj).__dictoffset__ and hasattr(obj, name) else ABSENT


LOCAL = _thread._local


def thread_dict_of(obj: Any) -> dict[str, Any]:
    """Returns the ``__dict__`` of a ``threading.local`` in the running thread."""
    return LOCAL.__getattribute__(obj, "__dict__")  # type: ignore[no-any-return]


class DirectWorld:
    """The real world: every access behaves as in CPython."""

    def load_global(self, namespace: dict[str, Any], name: str) -> Any:
        if name in namespace:
            return namespace[name]
        space = namespace.get("__builtins__", builtins)
        if safe_isinstance(space, types.ModuleType):
            space = vars(space)
        if safe_isinstance(space, dict):
            return space.get(name, ABSENT)
        try:
            return space[name]
        except KeyError:
            return ABSENT

    def store_global(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        namespace[name] = value

    def delete_global(self, namespace: dict[str, Any], name: str) -> bool:
        return namespace.pop(name, ABSENT) is not ABSENT

    def run_in(self, space: dict[str, Any]) -> None:
        return None

    def globals_dict(self, space: dict[str, Any]) -> dict[str, Any]:
        return space

    def load_cell(self, cell: types.CellType) -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return ABSENT

    def store_cell(self, cell: types.CellType, value: Any) -> None:
        if value is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    def new_cell(self, cell: types.CellType) -> None:
        return None

    def new_function(self, fn: types.FunctionType) -> None:
        return None

    def imported(self, name: str, space: dict[str, Any], level: int) -> None:
        return None

    def not_imported(self, error: ImportError, name: str) -> None:
        return None

    def found_module(self, name: str) -> Any:
        return sys.modules.get(name, ABSENT)

    def runs(self, fn: types.FunctionType, natively: bool, answered: bool = False) -> bool:
        return True

    def refusal(self, error: BaseException) -> Unsupported | None:
        return None

    def unheard(self, error: BaseException) -> bool:
        return not safe_isinstance(error, Unsupported)

    def watched(self, value: Any) -> bool:
        return False

    def type_of(self, obj: Any) -> type:
        return type(obj)

    def class_attr(self, cls: type, name: str) -> Any:
        for base in type.__getattribute__(cls, "__mro__"):
            space = type.__getattribute__(base, "__dict__")
            if name in space:
                return space[name]
        return ABSENT

    def instance_attr(self, obj: Any, name: str) -> Any:
        try:
            local = issubclass(type(obj), LOCAL)
            if local and name == "__dict__":
                return thread_dict_of(obj)
            space = thread_dict_of(obj) if local else object.__getattribute__(obj, "__dict__")
        except AttributeError:
            return hidden_attr(obj, name)
        return space[name] if name in space else ABSENT

    def set_instance_attr(self, obj: Any, name: str, value: Any) -> None:
        if safe_isinstance(obj, type):
            type.__setattr__(obj, name, value)
        elif safe_isinstance(obj, types.ModuleType):
            types.ModuleType.__setattr__(obj, name, value)
        elif issubclass(type(obj), LOCAL):
            LOCAL.__setattr__(obj, name, value)
        else:
            object.__setattr__(obj, name, value)

    def del_instance_attr(self, obj: Any, name: str) -> None:
        if safe_isinstance(obj, type):
            type.__delattr__(obj, name)
        elif safe_isinstance(obj, types.ModuleType):
            types.ModuleType.__delattr__(obj, name)
        elif issubclass(type(obj), LOCAL):
            LOCAL.__delattr__(obj, name)
        else:
            object.__delattr__(obj, name)

    def native_getattr(self, obj: Any, name: str) -> Any:
        return getattr(obj, name)

    def override_getattr(self, obj: Any, name: str) -> Any:
        return ABSENT

    def override_setattr(self, obj: Any, name: str, value: Any) -> bool:
        return False

    def override_delattr(self, obj: Any, name: str) -> bool:
        return False

    def override_operator(self, name: str, args: tuple[Any, ...]) -> Any:
        return ABSENT

    def as_key(self, key: Any) -> Any:
        return key

    def truth(self, value: Any) -> Any:
        return bool(value)

    def grant(self, condition: Any, holds: bool) -> bool:
        return False

    def usual_truth(self, frame: Frame) -> bool | None:
        return None

    def native_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(*args, **kwargs)

    def intercept_call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ABSENT

    def callback(self, fn: Any, reenter: Callable[..., Any]) -> Any:
        return reenter
