"""Where ``optim`` and ``hooks`` plug into the compiler; nothing in ``compile`` imports them.

An interceptor is keyed by the Python function it replaces during a capture (a method's function for methods, ``self``
being the first argument). It gets the capturing world and the call's arguments and returns the call's value, or
:data:`~sidefx_train.compile.capture.interpreter.world.ABSENT` to let the call go its normal way.
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

AttributeHook = Callable[[Any, Any, str], Any]
"""``(world, obj, name) -> value or ABSENT``."""

ATTRIBUTE_HOOKS: list[tuple[type, str, AttributeHook]] = []
"""First look at attribute loads from instances of ``nn.Module`` subclasses, by base class and name."""

LOOKED_UP: dict[Any, str] = {}
"""Functions that such hooks bind in place of a method, with its name: bound, they leave a step as the method itself."""

COUNTERS: dict[tuple[type, str], int] = {}
"""Class attributes that only number objects made by the class: the capture counts from a start of its own, and nothing
is guarded or written back. An object numbered so must not leave the step in a dict keyed by its number."""

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


LATE: list[Callable[[], bool]] = []
"""Plug-ins for libraries that the user may not have imported yet; each says whether it is done."""


def late(plug: Callable[[], bool]) -> Callable[[], bool]:
    """Registers a plug-in that is tried at the start of every capture until it says it is done."""
    LATE.append(plug)
    return plug


def plug_late() -> None:
    """Tries the late plug-ins that are still waiting."""
    LATE[:] = [plug for plug in LATE if not plug()]
