"""Describes names, values and errors in one line."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from sidefx_train.compile.capture.guards.guard import shown
from sidefx_train.compile.capture.shadows.deferred_values import message_of
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.user_code import PACKAGE_DIR, name_of
from sidefx_train.errors import Location


def callers_level() -> int:
    """Returns the ``stacklevel`` of the user's call for a warning issued by the calling function."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((PACKAGE_DIR, "<sidefx_train")):
        level, frame = level + 1, frame.f_back
    return level


def short(value: Any) -> str:
    """Returns a value as at most 120 characters, without calling the program's own methods."""
    if isinstance(value, str):
        text = value
    elif type(value) in (tuple, list, dict, set, frozenset) or not is_library(type(value).__module__):
        text = shown(value)  # a user's own __str__ may have effects
    else:
        text = str(value) if not callable(value) else name_of(value)
    return text if len(text) <= 120 else text[:117] + "..."


def summary(error: BaseException) -> str:
    """Returns the class of an error and the first line of its message."""
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".strip(": ")


def user_location(error: BaseException) -> Location | None:
    """Returns the innermost line of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return Location(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name) if frames else None
