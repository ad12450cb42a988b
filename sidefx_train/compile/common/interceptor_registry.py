"""Registry through which ``optim`` and ``hooks`` extend the compiler; nothing in ``compile`` imports them.

An interceptor is keyed by the Python function it replaces during a capture (a method's function for methods, with
``self`` as the first argument). It receives the capturing world and the call's arguments and returns the call's result,
or :data:`~sidefx_train.compile.capture.interpreter.world.ABSENT` for the default handling.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from sidefx_train.compile.common.sentinels import ABSENT, transparent

Interceptor = Callable[..., Any]
"""``(world, args, kwargs) -> value or ABSENT``."""

INTERCEPTORS: dict[Any, Interceptor] = {}
"""Interceptors by function (or class, for constructor calls), compared by identity through its hash."""

METHOD_INTERCEPTORS: list[tuple[type, str, Interceptor]] = []
"""Interceptors by base class and method name, which also apply to overrides in subclasses."""

AttributeHook = Callable[[Any, Any, str], Any]
"""``(world, obj, name) -> value or ABSENT``."""

ATTRIBUTE_HOOKS: list[tuple[type, str, AttributeHook]] = []
"""Called first for attribute loads from instances of ``nn.Module`` subclasses, by base class and name."""

LOOKED_UP: dict[Any, str] = {}
"""Functions that such hooks bind in place of a method, with its name: a bound one leaves a step as the method
itself."""

COUNTERS: dict[tuple[type, str], int] = {}
"""Class attributes that only number the objects created by the class: the capture counts from its own start, without
guards or effects. An object with such a number must not leave the step in a dict keyed by it."""

SYMBOLIC_FLOATS: list[tuple[type, str]] = []
"""Attributes below which every float is an input of the graph, never a constant (an optimizer's param_groups)."""

STATIC_ATTRIBUTES: list[tuple[type, str]] = []
"""Attributes below which tensors keep their identity between steps (parameters, buffers, optimizer state)."""


AT_END: list[Callable[[Any], None]] = []
"""``(world) -> None``: called when a step has been interpreted to its end; may refuse the capture."""

READ_ON_HOST: list[tuple[type, str]] = []
"""Attributes below which 0-dim tensors of a device are read before the graph where the step reads them: eager waits
for the device there, too, and decides by them what runs."""


def bound_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Returns the arguments of a call by name, with defaults; ``None`` if they do not fit the signature."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


def intercept(*targets: Any) -> Callable[[Interceptor], Interceptor]:
    """Registers an interceptor for functions or classes."""

    def register(handler: Interceptor) -> Interceptor:
        for target in targets:
            INTERCEPTORS[target] = handler
        return handler

    return register


def interpret_instead(original: Any, ours: Callable[..., Any], unless: str = "") -> None:
    """Has captures interpret ``ours`` in place of a Python function: a plain call, in which a part may end.

    Args:
        original: the function.
        ours: takes the same arguments, and does the same where it runs natively, behind a graph break.
        unless: a keyword argument with which a call is left to ``original``.
    """
    INTERCEPTORS[original] = partial(call_instead, ours, unless)


@transparent
def call_instead(ours: Any, unless: str, world: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The interceptor of :func:`interpret_instead`."""
    return ABSENT if unless in kwargs else world.interp.call(ours, args, kwargs)


def intercept_method(base: type, name: str) -> Callable[[Interceptor], Interceptor]:
    """Registers an interceptor for a method of a class and all its subclasses."""

    def register(handler: Interceptor) -> Interceptor:
        METHOD_INTERCEPTORS.append((base, name, handler))
        return handler

    return register


LATE: list[Callable[[], bool]] = []
"""Registrations for libraries that the user may not have imported yet; each returns True when done."""


def late(plug: Callable[[], bool]) -> Callable[[], bool]:
    """Adds a registration that is tried at the start of every capture until it returns True."""
    LATE.append(plug)
    return plug


def plug_late() -> None:
    """Tries the pending registrations."""
    LATE[:] = [plug for plug in LATE if not plug()]
