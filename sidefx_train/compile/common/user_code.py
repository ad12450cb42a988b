"""Finds the user's own source files, and the definition and parameters of a step."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import Any

from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.errors import Location

PACKAGE_DIR = os.path.abspath(sys.modules["sidefx_train"].__path__[0]) + os.sep
"""Folder of this package: code below it is not the user's."""


@functools.cache
def is_user_file(file: str) -> bool:
    """Returns False for the standard library, torch, this package and generated code."""
    if file.startswith("<"):
        return False
    if file.startswith(PACKAGE_DIR):
        return False
    if "site-packages" not in file:
        for name in ("stdlib", "platstdlib"):
            if file.startswith(sysconfig.get_path(name) + os.sep):
                return False
    torch = sys.modules.get("torch")
    where = getattr(torch, "__file__", None)
    return where is None or not file.startswith(os.path.dirname(where) + os.sep)


def definition_of(fn: Callable[..., Any]) -> tuple[Location | None, Callable[[int], str]]:
    """Returns the line of a step's definition and its names of positional arguments; ``None``, ``args[i]`` for C
    code."""
    called: Any = fn if type(fn) in (types.FunctionType, types.MethodType) else _method(fn)
    bound = type(called) is types.MethodType
    code = getattr(called.__func__ if bound else called, "__code__", None)
    if type(code) is not types.CodeType:
        return None, "args[{}]".format
    names = code.co_varnames[bound : code.co_argcount]
    rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount] if code.co_flags & inspect.CO_VARARGS else "args"

    def parameter(position: int) -> str:
        return names[position] if position < len(names) else f"{rest}[{position - len(names)}]"

    return Location(code.co_filename, code.co_firstlineno, code.co_qualname), parameter


def _method(fn: Any) -> types.MethodType | None:
    """Returns the method that Python calls for an object of a class with ``__call__``; a module's own ``forward``."""
    for name in ("forward", "__call__"):
        found = inspect.getattr_static(type(fn), name, None)
        if safe_isinstance(found, types.FunctionType):
            return types.MethodType(found, fn)
    return None


def name_of(fn: Any) -> str:
    """Returns the name of a callable for reports: that of its bound function, or of its class."""
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def describable(fn: Any) -> Any:
    """Returns the object that provides the name and docstring of a wrapper."""
    return fn if hasattr(fn, "__name__") else type(fn)


def global_name_of(wrapper: Any, fn: Any) -> str | None:
    """Returns the name under which pickle finds ``wrapper``, if it has replaced the global ``fn`` that it decorates."""
    found: Any = sys.modules.get(getattr(fn, "__module__", None) or "")
    name: str = getattr(fn, "__qualname__", "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return name if found is wrapper else None
