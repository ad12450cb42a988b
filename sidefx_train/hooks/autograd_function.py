"""``torch.autograd.Function`` during a capture: the interpreter runs its forward and backward.

C code calls ``forward``, ``backward`` and ``setup_context`` of the class passed to ``apply``. A capture passes a
subclass whose methods re-enter the interpreter, so that their reads are guarded and their changes are effects. The
context object, its saved tensors and its marks are torch's own.
"""

from __future__ import annotations

import inspect
import types
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


_METHODS = ("forward", "setup_context", "backward", "vjp", "jvp", "vmap")


@registry.intercept(type(torch.autograd.Function).__init__)
def _number_class(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Sets node class and number, from torch's own counter, for a function class created in the step."""
    type(torch.autograd.Function).__init__(*args, **kwargs)


@registry.intercept(compat.FUNCTION_APPLY)
def _apply(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cls = args[0]
    if cls in world.reentering_classes.values():
        return ABSENT
    if cls not in world.reentering_classes:
        world.reentering_classes[cls] = _reentering_class(world, cls)
    return world.interp.call(compat.bound_apply(world.reentering_classes[cls]), args[1:], kwargs)


@registry.intercept(compat.apply_in_transform)
def _apply_in_transform(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies a function in a ``grad`` or ``jvp`` of ``torch.func``, through the class that torch generates for it."""
    transform, cls, *operands = args
    generated = world.interp.call(compat.class_in_transform, (transform, cls), {})
    with compat.single_level_functions():
        apply = world.interp.getattr(_reentering_class(world, generated), "apply")
        return world.interp.call(apply, tuple(operands), kwargs)


def _reentering_class(world: TraceWorld, cls: type) -> type:
    """Returns a re-entering subclass of ``cls`` with the same name; methods other than those of torch's own class are
    interpreted."""
    methods: dict[str, Any] = {}
    for name in _METHODS:
        if getattr(cls, name, None) not in (None, getattr(torch.autograd.Function, name, None)):
            method = world.interp.getattr(cls, name)
            methods[name] = staticmethod(_with_signature(world.interp.reentering(method), method))
    return type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **methods})


def _with_signature(reentering: Any, method: Any) -> Any:
    """Copies the signature: C code reads default arguments from it and passes them to ``setup_context``."""
    if reentering is not method and safe_isinstance(method, types.FunctionType):
        reentering.__signature__ = inspect.signature(method)
    return reentering
