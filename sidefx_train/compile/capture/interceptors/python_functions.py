"""Functions of Python's standard library: ``math.isfinite`` and its like, ``max``, ``min``, ``sys._getframe``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.world.native_calls.caller_frames import BEYOND, refuse_callers
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def _assume_finite(fn: Any, answer: bool, infinite: bool, nan: bool) -> None:
    """Has the usual answer of ``math.isfinite`` or its like assumed for a number that only the graph knows."""

    @registry.intercept(fn)
    def asked(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs or not world.grant_finite(args[0], infinite=infinite, nan=nan):
            return ABSENT
        return answer


_assume_finite(math.isfinite, True, infinite=True, nan=True)
_assume_finite(math.isinf, False, infinite=True, nan=False)
_assume_finite(math.isnan, False, infinite=False, nan=True)


def _choose_in_graph(fn: Any, symbolic: Callable[[Any, Any], Any]) -> None:
    """Has ``max`` or ``min`` of numbers that the graph computes computed there (``Adafactor`` scales by a norm)."""

    @registry.intercept(fn)
    def choose(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 2 or kwargs or not all(safe_isinstance(value, (*compat.SYMBOLS, int, float)) for value in args):
            return ABSENT
        if not any(safe_isinstance(value, compat.SYMBOLS) and compat.is_unbacked(value) for value in args):
            return ABSENT
        kinds = {world.type_of(value) for value in args}
        return symbolic(*args) if len(kinds) == 1 and bool not in kinds else ABSENT


_choose_in_graph(max, torch.sym_max)
_choose_in_graph(min, torch.sym_min)


@registry.intercept(sys._getframe)
def getframe(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Interpreted frames have frame objects; the frames of callers are read at a graph break."""
    frame, depth = world.interp.current_frame, args[0] if args else 0
    while frame is not None and depth > 0:
        frame, depth = frame.back, depth - 1
    if frame is None or BEYOND in world.specialization.opaque_classes:
        refuse_callers(world)
    return ABSENT
