"""``range`` of integers that change: the population of a draw, or what a loop runs over."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.deferred_values import RangeOfNumber
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import attribute_of

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.frame import Frame
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_DRAWING = (random.Random.sample, random.Random.choices, random.Random.choice)
_ITERATING = (enumerate, list, tuple, reversed, zip)
_MOST_ITEMS = 10_000
"""Limit of symbolic items of a range."""


@registry.intercept(range)
def _range(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keeps the bounds symbolic where only a draw or a loop reads the range: the object itself shows them."""
    frame = world.interp.current_frame
    if kwargs or frame is None or world.branching or not 1 <= len(args) <= 3:
        return ABSENT
    if not compat.are_changing_integers(*args) or not all(_is_integer(each) for each in args):
        return ABSENT
    call = frame.instructions[frame.pc - 1]
    if call.name != "CALL" or call.arg != len(args):  # called by C code
        return ABSENT
    if frame.instructions[frame.pc].name == "GET_ITER":
        return _items(args)
    calls = _is_argument_of_call(frame)
    if calls and _is_called(frame, _ITERATING):
        return _items(args)
    if calls and len(args) == 1 and world.specialization.host_draws and _is_called(frame, _DRAWING):
        return RangeOfNumber(args[0])
    return ABSENT


def _is_integer(value: Any) -> bool:
    return type(value) is int or compat.is_symbolic_integer(value)


def _items(args: tuple[Any, ...]) -> Any:
    """Returns what has the items of ``range(*args)``, under a guard on how many they are, not on the bounds."""
    start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    if step == 0:
        return ABSENT
    span, stride = (stop - start, step) if step > 0 else (start - stop, -step)
    count = int((span + stride - 1) // stride) if span > 0 else 0
    if type(start) is int and type(step) is int:
        return range(start, start + count * step, step)
    return tuple(start + i * step for i in range(count)) if count <= _MOST_ITEMS else ABSENT


def _is_called(frame: Frame, functions: tuple[Any, ...]) -> bool:
    """Returns True if one of these functions is next on the stack."""
    called = [attribute_of(value, "__func__", value) for value in frame.stack[-2:]]
    return any(value is function for value in called for function in functions)


_PUSHES = {"LOAD_CONST": 1, "LOAD_FAST": 1, "LOAD_SLOT": 1, "LOAD_DEREF": 1, "LOAD_NAME": 1, "PUSH_NULL": 1}
_PUSHES |= {"LOAD_METHOD": 1, "LOAD_ATTR": 0, "LOAD_FAST_LOAD_FAST": 2, "BINARY_OP": -1, "NOP": 0, "PRECALL": 0}
"""How many values more than before are on the stack after an instruction that evaluates a further argument."""


def _is_argument_of_call(frame: Frame) -> bool:
    """Returns True if the next value is on the stack of a frame only as the first argument of a call."""
    above = 0
    for instr in frame.instructions[frame.pc :]:
        if instr.name in ("CALL", "CALL_KW"):
            taken = instr.arg + (instr.name == "CALL_KW")
            if taken > above:
                return taken == above + 1
            above -= taken + 1
        elif instr.name == "LOAD_GLOBAL":
            above += 2 if instr.arg else 1
        elif instr.name in _PUSHES:
            read = {"LOAD_METHOD": 1, "LOAD_ATTR": 1, "BINARY_OP": 2}.get(instr.name, 0)
            if above < read:
                return False
            above += _PUSHES[instr.name]
        else:
            return False
    return False
