"""``torch.autograd.Function`` during a capture: the interpreter runs its forward and backward.

C code calls ``forward``, ``backward`` and ``setup_context`` of the class passed to ``apply``. A capture passes a
subclass whose methods re-enter the interpreter, so that their reads are guarded and their changes are effects. The
context object, its saved tensors and its marks are torch's own.
"""

from __future__ import annotations

import inspect
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import FunctionCtx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.plain_values import base_container
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


class _Held:
    """An argument that C code only passes on: it reads no container."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _held(value: Any) -> Any:
    return value if base_container(type(value)) is None else _Held(value)


def _freed(value: Any) -> Any:
    if type(value) is tuple and any(type(each) is _Held for each in value):
        return tuple(map(_freed, value))
    return value.value if type(value) is _Held else value


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
    given = args[1:] if compat.inside_transform() else tuple(map(_held, args[1:]))
    made = world.interp.call(compat.bound_apply(world.reentering_classes[cls]), given, kwargs)
    if world.specialization.native_backward and not kwargs:
        world.custom_functions.note(cls, args[1:], made)
    return made


@registry.intercept(FunctionCtx.save_for_backward)
def _save(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = world.custom_functions.context(args[0])
    context.saved = args[1:]
    context.versions = tuple(value._version if safe_isinstance(value, torch.Tensor) else 0 for value in args[1:])
    return ABSENT


@registry.intercept(FunctionCtx.set_materialize_grads)
def _materialize(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (value,) = (*args[1:], *kwargs.values())
    world.custom_functions.context(args[0]).materializes = bool(value)
    return ABSENT


@registry.intercept(FunctionCtx.mark_non_differentiable)
def _mark(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    world.custom_functions.context(args[0]).without_gradient = args[1:]
    return ABSENT


@registry.intercept(FunctionCtx.mark_dirty, FunctionCtx.save_for_forward)
def _write(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    world.custom_functions.context(args[0]).writes = True
    return ABSENT


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
            reentering = world.interp.reentering(method)
            reentering = _passing_on(reentering) if name in ("forward", "setup_context") else reentering
            methods[name] = staticmethod(_with_signature(reentering, method))
    methods |= {name: _backward(world, methods[name]) for name in ("backward", "vjp") if name in methods}
    return type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **methods})


def _passing_on(method: Any) -> Any:
    """Returns a method that gets the program's arguments in place of those that C code was given."""

    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        return method(*map(_freed, (ctx, *args)), **{name: _freed(value) for name, value in kwargs.items()})

    return run


def _backward(world: TraceWorld, method: Any) -> Any:
    """Returns a backward for the class: while a backward is recorded that runs outside, it passes no gradient on if it
    runs natively in that, and else leaves its context as it was."""
    held, differentiate = weakref.ref(world), method.__func__

    def backward(ctx: Any, *grads: Any) -> Any:
        alive = held()
        if alive is None or not alive.custom_functions.recording:
            return differentiate(ctx, *grads)
        if alive.custom_functions.leaves_out(ctx):
            return (None,) * len(ctx.needs_input_grad)
        with alive.custom_functions.context_kept(ctx):
            return differentiate(ctx, *grads)

    return staticmethod(backward)


def _with_signature(reentering: Any, method: Any) -> Any:
    """Copies the signature: C code reads default arguments from it and passes them to ``setup_context``."""
    if reentering is not method and safe_isinstance(method, types.FunctionType):
        reentering.__signature__ = inspect.signature(method)
    return reentering
