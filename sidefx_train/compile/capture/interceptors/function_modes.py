"""Function modes of torch, and the switches of ``__torch_function__``, as a step enters, leaves and asks for them.

The thread's own stack and switches stay as they are; the world keeps those of the program
(``torch_overrides/function_overrides.py``). Modes of ``torch.device`` have no effects and are torch's own: they are
entered natively, below the others, as in eager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.objects.tensors import PLAIN_TENSORS
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(TorchFunctionMode.__enter__)
def _enter(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    world.functions.enter(args[0])
    return args[0]


@registry.intercept(TorchFunctionMode.__exit__)
def _leave(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None if world.functions.modes and world.functions.leave() else ABSENT


@registry.intercept(compat.PUSHES_FUNCTION_MODE)
def _push(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if type(args[0]) is compat.DeviceContext:
        return ABSENT
    world.functions.enter(args[0])
    return None


@registry.intercept(compat.POPS_FUNCTION_MODE)
def _pop(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return world.functions.leave() if world.functions.modes else ABSENT


@registry.intercept(compat.NUMBER_OF_FUNCTION_MODES)
def _number(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return compat.NUMBER_OF_FUNCTION_MODES() + len(world.functions.modes) if world.functions.modes else ABSENT


@registry.intercept(compat.FUNCTION_MODE_AT)
def _at(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    below = compat.NUMBER_OF_FUNCTION_MODES()
    return world.functions.modes[args[0] - below] if args[0] >= below and world.functions.modes else ABSENT


@registry.intercept(compat.HAS_FUNCTION_MODE)
def _is_any(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if world.functions.all_off:
        return False
    return True if world.functions.modes else ABSENT


@registry.intercept(compat.HAS_OVERRIDE)
def _is_overridden(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or type(args[0]) not in (list, tuple):
        return ABSENT
    return world.functions.wanted(tuple(args[0]), {}, lists=False)


def _is_argument_overridden(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return world.functions.wanted(args, {}, lists=False)


for _asking in compat.HAS_OVERRIDE_OF_ARGUMENTS:
    registry.intercept(_asking)(_is_argument_overridden)


@registry.intercept(compat.SUBCLASSES_ENABLED)
def _enabled(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return False if world.functions.subclasses_off or world.functions.all_off else ABSENT


@registry.intercept(compat.FUNCTIONS_DISABLED)
def _all_disabled(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return True if world.functions.all_off else ABSENT


@registry.intercept(compat.DISABLES_SUBCLASSES.__enter__)
def _disable_subclasses(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    world.functions.subclasses_off += 1


@registry.intercept(compat.DISABLES_SUBCLASSES.__exit__)
def _enable_subclasses(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    world.functions.subclasses_off -= 1


@registry.intercept(compat.DISABLES_FUNCTIONS.__enter__)
def _disable_functions(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    world.functions.all_off += 1


@registry.intercept(compat.DISABLES_FUNCTIONS.__exit__)
def _enable_functions(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    world.functions.all_off -= 1


@registry.intercept(compat.NO_OVERRIDE)
def _call_without_subclasses(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function as ``super().__torch_function__`` does in a class with a ``__torch_dispatch__``."""
    func, _, *given = args
    world.functions.subclasses_off += 1
    try:
        return world.interp.call(func, tuple(given[0] if given else ()), dict(given[1] if len(given) > 1 else {}))
    finally:
        world.functions.subclasses_off -= 1


def _change(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses to change the stack or the switches past those functions."""
    world.heap.refuse("SFX111", "changes torch's stack of function modes")


for _changing in compat.CHANGES_FUNCTION_MODES:
    registry.intercept(_changing)(_change)


@registry.intercept(compat.AS_SUBCLASS)
def _as_subclass(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes an alias of a tensor as an instance of a subclass, which torch does past its dispatcher."""
    tensor, cls = args
    if kwargs or type(tensor) is not compat.FakeTensor or compat.is_wrapper_class(cls):
        return ABSENT
    if cls is not torch.Tensor:
        world.heap.shown.admit(cls, f"makes a {cls.__qualname__}")
    return world.functions.show(cls, torch.ops.aten.alias.default, tensor)


@registry.intercept(compat.MAKE_SUBCLASS)
def _make_subclass(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cls, tensor, *requires_grad = args
    if kwargs or type(tensor) is not compat.FakeTensor or cls in PLAIN_TENSORS or compat.is_wrapper_class(cls):
        return ABSENT
    world.heap.shown.admit(cls, f"makes a {cls.__qualname__}")
    made = world.functions.show(cls, torch.ops.aten.detach.default, tensor)
    return made.requires_grad_() if requires_grad and requires_grad[0] else made


@registry.intercept(torch.Tensor.__new__)
def _new(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not world.calls.makes_shown(args[0]):
        return ABSENT
    return world.functions.make(args[0], args[1:], kwargs)


@registry.intercept(compat.CONVERTS)
def _convert(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes the tensors in a function's result instances of a subclass."""
    result, cls = args
    if cls is torch.Tensor:
        return result
    if safe_isinstance(result, (tuple, list)):
        return world.interp.call(type(result), ([_convert(world, (item, cls), {}) for item in result],), {})
    if type(result) is not compat.FakeTensor or issubclass(world.interp.type_of(result), cls):
        return result
    return _as_subclass(world, (result, cls), {})
