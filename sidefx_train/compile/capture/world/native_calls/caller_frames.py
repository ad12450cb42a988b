"""Frames of the step and of what called it, for code that walks the stack."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, NoReturn

from sidefx_train.compile.capture.interpreter.exceptions import is_own
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext

BEYOND = "frames of the step's callers"
"""Learned by a capture whose program went further than the step's own frames."""


def caller_of(world: CaptureContext, frame: types.FrameType) -> types.FrameType | None:
    """``frame.f_back``.

    Raises:
        Unsupported: that is no frame of the step; the next attempt does not begin to walk.
    """
    back = frame.f_back
    if back is None or not is_own(back.f_code):
        return back
    stop = Unsupported("SFX103", "looks at the frames of the step's callers", world.locate())
    stop.defer = BEYOND
    raise stop


def refuse_callers(world: CaptureContext) -> NoReturn:
    """Stops the capture where the walk begins."""
    world.heap.refuse("SFX103", "looks at the frames of the step's callers")
