"""``transformers`` during a capture: its models check whether they are traced before they read a mask.

Eagerly they omit an attention mask that masks nothing, which is a branch on data. A captured step keeps the mask, as
the library does for every tracer: the same attention by another kernel, equal up to rounding.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.recording.constant_folding import constant_value
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.late
def register() -> bool:
    """Registers the interceptors after transformers was imported."""
    asks = getattr(sys.modules.get("transformers.utils.import_utils"), "is_tracing", None)
    if asks is None:
        return False
    registry.intercept(asks)(_is_tracing)
    return True


def _is_tracing(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    asked = args[0] if args else kwargs.get("tensor")
    if not safe_isinstance(asked, torch.Tensor):
        return ABSENT
    return constant_value(world.tracer, asked) is None
