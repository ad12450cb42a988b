"""When Python looks for garbage while this library is imported, and while a step is captured and compiled.

Imports and graphs make hundreds of thousands of objects that stay, so that Python looks through all there are again and
again: a fifth of the time of importing and of lowering, and once more when all is done, which takes as long as the C++
compiler. Here it looks among young objects only, and seldom, until the step has run, and among those made since it was
captured while the C++ compiler runs and there is nothing else to do. What else is due when the step has run is for
Python to say.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 200_000
"""Objects made between two collections of young ones."""

_SELDOM = 10_000
"""Collections of young objects between two of middle-aged ones, and of those between two of old ones."""

_lock = threading.Lock()
_inside = 0
_usual, _ours = (0, 0, 0), (0, 0, 0)


@contextmanager
def fewer_collections() -> Iterator[None]:
    """None but young objects are looked through; may be entered again, and by several threads."""
    global _inside, _usual, _ours
    with _lock:
        _inside += 1
        if _inside == 1:
            young, middle, old = _usual = gc.get_threshold()
            _ours = (max(young, _YOUNG) if young else 0, max(middle, _SELDOM), max(old, _SELDOM))
            gc.set_threshold(*_ours)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and gc.get_threshold() == _ours:  # else the program has set others
                gc.set_threshold(*_usual)


def collect_younger() -> None:
    """Within :func:`fewer_collections`: looks through the objects made since, unless the program switched that off."""
    if _inside and gc.isenabled() and _usual[0] > 0:
        gc.collect(1)
