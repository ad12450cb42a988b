"""Functions that give integers: ``round``, ``floor`` and ``bisect`` of symbolic numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.world.symbolic_numbers.number_bounds import is_of_integers
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


def positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments of ``round`` without names."""
    names = ("number", "ndigits")[len(args) :]
    if not kwargs or set(kwargs) != set(names[: len(kwargs)]):
        return args, kwargs
    return (*args, *(kwargs[name] for name in names if name in kwargs)), {}


def rounded(world: CaptureContext, number: Any, digits: Any) -> Any:
    """``round(number, digits)`` of a symbolic integer, of which torch's returns the integer as it is."""
    if type(digits) is not int and digits is not None:
        return world.guarded(round, (int(number), digits), {})
    if digits is None or digits >= 0:
        return number
    call, unit = world.interp.call, 10**-digits
    tens, rest = call(operator.floordiv, (number, unit), {}), call(operator.mod, (number, unit), {})
    odd = call(operator.mod, (tens, 2), {})
    # One more if the rest is over a half, or is a half and the tens are odd.
    more = call(operator.floordiv, (rest * 2 + odd + (unit - 1), 2 * unit), {})
    return call(operator.mul, (call(operator.add, (tens, more), {}), unit), {})


def computed_integer(world: CaptureContext, fn: Any, args: tuple[Any, ...]) -> Any:
    """Returns the integer of a symbolic float as a number of its own, which may be a size; else :data:`ABSENT`."""
    if type(args[0]) is not torch.SymFloat or compat.is_unbacked(args[0]):
        return ABSENT
    return world.computed_numbers.call(fn, args, {})


_ROUNDING: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    int: torch.trunc,
    math.trunc: torch.trunc,
    math.floor: torch.floor,
    math.ceil: torch.ceil,
    round: torch.round,
}


def unknown_integer(world: CaptureContext, fn: Any, number: Any) -> Any:
    """Returns the integer of a float that only the graph knows, as a number of the graph that may be a size.

    Sizes that are functions of floats could not be checked in the graph. A float that may be NaN gives
    :data:`ABSENT`: Python raises an error then, a tensor does not.
    """
    if type(number) is not torch.SymFloat or not compat.is_unbacked(number):
        return ABSENT
    if not is_of_integers(world.tracer, number):
        return ABSENT
    held = world.guarded(torch.scalar_tensor, (number,), {"dtype": torch.float64})
    integer = world.guarded(torch.Tensor.to, (world.guarded(_ROUNDING[fn], (held,), {}), torch.int64), {})
    return world.guarded(torch.Tensor.item, (integer,), {})


def divided(world: CaptureContext, args: tuple[Any, ...]) -> Any:
    """``divmod`` of numbers, of which the graph alone knows one."""
    return tuple(world.interp.call(fn, args, {}) for fn in (operator.floordiv, operator.mod))


def bisect(world: CaptureContext, right: bool, items: Any, value: Any, low: int = 0, high: int | None = None) -> Any:
    """Bisects with symbolic ``value``: its comparisons are guarded, its value is not."""
    high = len(items) if high is None else high
    while low < high:
        middle = (low + high) // 2
        if world.truth(value < items[middle] if right else value <= items[middle]):
            high = middle
        else:
            low = middle + 1
    return low
