"""``einx`` during a capture: its operations run natively on fake tensors.

An operation compiles a Python function for its pattern and the shapes of its arguments, keeps it in a cache, and calls
it. Nothing but that cache is changed, and the library itself gives its operations to
``torch.compiler.allow_in_graph``. Interpreted, its parser and its registry of backends would be captured too.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_PLAIN = (str, int, float, bool, type(None), torch.dtype)


@registry.late
def register() -> bool:
    """Registers the interceptor after einx was imported."""
    operations = getattr(sys.modules.get("einx._src.frontend.ops"), "ops", None)
    if operations is None:
        return False
    for operation in operations:
        registry.intercept(operation)(functools.partial(_natively, operation))
    return True


def _natively(operation: Any, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return world.guarded(operation, args, kwargs) if all(map(_is_plain, (*args, *kwargs.values()))) else ABSENT


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or safe_isinstance(value, torch.Tensor)
