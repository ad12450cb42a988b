"""Function modes of torch, and the switches of ``__torch_function__``, as a step enters, leaves and asks for them.

The thread's own stack and switches stay as they are; the world keeps those of the program
(``native_calls/function_overrides.py``). Modes of ``torch.device`` have no effects and are torch's own: they are entered
natively, below the others, as in eager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

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


def _change(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses to change the stack or the switches past those functions."""
    world.heap.refuse("SFX111", "changes torch's stack of function modes")


for _changing in compat.CHANGES_FUNCTION_MODES:
    registry.intercept(_changing)(_change)
