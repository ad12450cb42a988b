"""The registry of substitutes: Python functions that the interpreter runs in place of builtins."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI

Substitute = Callable[["InterpreterAPI", tuple[Any, ...], dict[str, Any]], Any]
"""``substitute(interp, args, kwargs)`` does what the builtin does, with Python code of the program interpreted."""

SUBSTITUTES: dict[int, Substitute] = {}
"""Substitutes by the identity of the builtin."""
CLASS_METHODS: dict[Any, Substitute] = {}
"""Substitutes of class methods written in C: every access returns a new, equal object."""
METHODS: dict[Any, Substitute] = {}
"""Substitutes of methods of builtin containers, by descriptor."""
METHOD_NAMES: set[str] = set()
"""Names of the methods in :data:`METHODS`."""
_registered: list[Any] = []


def register(fn: Any) -> Callable[[Substitute], Substitute]:
    """Decorator that registers a substitute of ``fn``."""

    def add(substitute: Substitute) -> Substitute:
        assert id(fn) not in SUBSTITUTES, f"{fn!r} has two substitutes"
        SUBSTITUTES[id(fn)] = substitute
        _registered.append(fn)  # its identity is the key
        if type(fn) is types.BuiltinFunctionType:
            CLASS_METHODS[fn] = substitute
        return substitute

    return add


def register_method(fn: Any) -> Callable[[Substitute], Substitute]:
    """Decorator that registers a substitute of a method of a builtin container, also where it is bound."""

    def add(substitute: Substitute) -> Substitute:
        METHODS[fn] = substitute
        METHOD_NAMES.add(fn.__name__)
        return register(fn)(substitute)

    return add
