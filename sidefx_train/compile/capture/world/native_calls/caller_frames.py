"""Frames of the step and of its callers, for code that walks the stack."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, NoReturn

from sidefx_train.compile.capture.interpreter.exceptions import is_own
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext

BEYOND = "frames of the step's callers"
"""Specialization of a program that walks past the step's own frames."""


def caller_of(world: CaptureContext, frame: types.FrameType) -> types.FrameType | None:
    """``frame.f_back``.

    Raises:
        Unsupported: the caller is outside the step; the next capture breaks before the walk.
    """
    back = frame.f_back
    if back is None or not is_own(back.f_code):
        return back
    stop = Unsupported("SFX103", "reads the frames of the step's callers", world.locate())
    stop.defer = BEYOND
    raise stop


def refuse_callers(world: CaptureContext) -> NoReturn:
    """Stops the capture where the walk begins."""
    world.heap.refuse("SFX103", "reads the frames of the step's callers")
