"""``torch.autograd.Function`` during a capture: its Python runs in the interpreter, forward and backward.

C code calls ``forward``, ``backward`` and ``setup_context`` of the class it is given. It is given a twin of the user's
class whose methods come back to the interpreter, so that what they read is guarded and what they change is an effect.
The context object, its saved tensors and its marks are torch's own.
"""

from __future__ import annotations

import inspect
import types
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


_METHODS = ("forward", "setup_context", "backward", "vjp", "jvp", "vmap")


@registry.intercept(type(torch.autograd.Function).__init__)
def _number_class(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A function class made in the step gets its node class and its number from torch's own counter."""
    type(torch.autograd.Function).__init__(*args, **kwargs)


@registry.intercept(torch.autograd.Function.apply.__func__)  # type: ignore[attr-defined]
def _apply(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cls = args[0]
    if cls in world.reentering_classes.values():
        return ABSENT
    if cls not in world.reentering_classes:
        world.reentering_classes[cls] = _reentering_class(world, cls)
    return world.interp.call(torch.autograd.Function.apply.__func__, (world.reentering_classes[cls], *args[1:]), kwargs)  # type: ignore[attr-defined]


def _reentering_class(world: TraceWorld, cls: type) -> type:
    """A subclass of ``cls`` of the same name; the methods that ``cls`` defines itself are interpreted."""
    methods: dict[str, Any] = {}
    for name in _METHODS:
        if _definer(cls, name) not in torch.autograd.Function.__mro__:
            method = world.interp.getattr(cls, name)
            methods[name] = staticmethod(_with_signature(world.interp.reentering(method), method))
    return type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **methods})


def _with_signature(reentering: Any, method: Any) -> Any:
    """Default arguments are read from the signature, and handed to ``setup_context``."""
    if reentering is not method and safe_isinstance(method, types.FunctionType):
        reentering.__signature__ = inspect.signature(method)
    return reentering


def _definer(cls: type, name: str) -> type:
    """The class of the MRO that defines ``name``."""
    return next(base for base in cls.__mro__ if name in vars(base))
