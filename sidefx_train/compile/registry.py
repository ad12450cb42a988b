"""Where ``optim`` and ``hooks`` plug into the compiler; nothing in ``compile`` imports them.

An interceptor is keyed by the Python function it replaces during a capture (a method's function for methods, ``self``
being the first argument). It gets the capturing world and the call's arguments and returns the call's value, or
:data:`~sidefx_train.compile.capture.world.ABSENT` to let the call go its normal way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Interceptor = Callable[..., Any]
"""``(world, args, kwargs) -> value or ABSENT``."""

INTERCEPTORS: dict[Any, Interceptor] = {}
"""By function (or class, for constructor calls), compared by identity through its hash."""

METHOD_INTERCEPTORS: list[tuple[type, str, Interceptor]] = []
"""By base class and method name: applies to overrides in subclasses too."""

SYMBOLIC_FLOATS: list[tuple[type, str]] = []
"""Attributes below which every float is an input of the graph, never a constant (an optimizer's param_groups)."""

STATIC_ATTRIBUTES: list[tuple[type, str]] = []
"""Attributes below which tensors keep their identity from step to step (parameters, buffers, optimizer state)."""


def intercept(*targets: Any) -> Callable[[Interceptor], Interceptor]:
    """Registers an interceptor for functions or classes."""

    def register(handler: Interceptor) -> Interceptor:
        for target in targets:
            INTERCEPTORS[target] = handler
        return handler

    return register


def intercept_method(base: type, name: str) -> Callable[[Interceptor], Interceptor]:
    """Registers an interceptor for a method of a class and all its subclasses."""

    def register(handler: Interceptor) -> Interceptor:
        METHOD_INTERCEPTORS.append((base, name, handler))
        return handler

    return register
