"""Backwards of this library's own autograd functions, which cannot be differentiated."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.common.distributed_models import refuse_whole

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def once_differentiated(world: TraceWorld, of: str) -> Callable[[], None]:
    """Returns a function that stops the capture if a backward is to be differentiated.

    Args:
        world: the capturing world; it is not kept alive.
        of: what the backward is of, for the message.
    """
    return functools.partial(_check, weakref.ref(world), of)


def _check(reference: Any, of: str) -> None:
    world = reference()
    assert world is not None, "a backward is recorded after its capture"
    if torch.is_grad_enabled():
        refuse_whole("SFX102", f"the derivative of the backward of {of}", world.locate())
