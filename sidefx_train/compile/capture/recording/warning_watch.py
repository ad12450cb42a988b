"""Watches whether Python code that runs natively in a capture calls ``warnings.warn``.

The native hook costs nothing. Until it is built, a profile function looks at every call; it is suspended while an
operation is recorded, which is most of what runs, where CPython can do that cheaply.
"""

from __future__ import annotations

import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sidefx_train.compile.native import guards_if_stored

Observer = Callable[[types.FrameType], None]
"""Gets the frame that calls ``warnings.warn``."""

_SWITCHING_IS_CHEAP = sys.version_info < (3, 12)
"""From 3.12, each change of the profile function makes CPython instrument all code again."""


class _Profile:
    """Calls the observer from a profile function."""

    cheap = _SWITCHING_IS_CHEAP

    def set(self, observer: Observer | None) -> None:
        def look(frame: types.FrameType, event: str, called: Any) -> None:
            if event == "c_call" and called is warnings.warn:
                assert observer is not None
                observer(frame)

        sys.setprofile(None if observer is None else look)


class _Hook:
    """Calls the observer from the native hook."""

    cheap = True

    def __init__(self, set_observer: Callable[[Callable[[], None] | None], Any]) -> None:
        self._set = set_observer

    def set(self, observer: Observer | None) -> None:
        self._set(None if observer is None else lambda: observer(sys._getframe(1)))


class _Active(threading.local):
    """The watch of this thread, if any."""

    watch: tuple[_Profile | _Hook, Observer] | None = None


_ACTIVE = _Active()


@contextmanager
def watched(observer: Observer) -> Iterator[None]:
    """Calls ``observer`` before each ``warnings.warn`` of this thread. Within a watch, it does nothing.

    Without the native hook, a profile function of the user stays in place, and nothing is observed.
    """
    way = _way() if _ACTIVE.watch is None else None
    if way is None:
        yield
        return
    _ACTIVE.watch = (way, observer)
    way.set(observer)
    try:
        yield
    finally:
        way.set(None)
        _ACTIVE.watch = None


def _way() -> _Profile | _Hook | None:
    native = guards_if_stored()
    if native is not None:
        return _Hook(native.observe_warnings)
    return _Profile() if sys.getprofile() is None else None


def suspend(recording: bool = False) -> tuple[_Profile | _Hook, Observer] | None:
    """Stops the watch of this thread until ``resume`` is called with the result.

    Args:
        recording: an operation is recorded; the watch goes on if stopping it costs more.
    """
    watch = _ACTIVE.watch
    if watch is None or (recording and not watch[0].cheap):
        return None
    _ACTIVE.watch = None
    watch[0].set(None)
    return watch


def resume(watch: tuple[_Profile | _Hook, Observer] | None) -> None:
    """Continues the watch that ``suspend`` stopped."""
    if watch is not None:
        _ACTIVE.watch = watch
        watch[0].set(watch[1])
