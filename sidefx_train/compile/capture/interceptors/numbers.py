"""``max`` and ``min`` of numbers that the graph computes (``Adafactor`` scales by a parameter's norm)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def _register(fn: Any, symbolic: Any) -> None:
    @registry.intercept(fn)
    def choose(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 2 or kwargs or not all(safe_isinstance(value, (*compat.SYMBOLS, int, float)) for value in args):
            return ABSENT
        if not any(safe_isinstance(value, compat.SYMBOLS) and compat.is_unbacked(value) for value in args):
            return ABSENT
        kinds = {world.type_of(value) for value in args}
        return symbolic(*args) if len(kinds) == 1 else ABSENT


_register(max, torch.sym_max)
_register(min, torch.sym_min)
