"""Controls Python's garbage collector while this library is imported and while a step is captured and compiled.

Imports and graphs create hundreds of thousands of long-lived objects. With Python's defaults, full collections traverse
them again and again: a fifth of the time of importing and of lowering, plus one collection at the end that takes as
long as the C++ compiler. Within this module's context only young objects are collected, and rarely, until the step has
run. While the C++ compiler runs and the process would wait, the objects created since the capture are collected.
Python's own schedule decides about everything else after the step.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 200_000
"""Objects created between two collections of the youngest generation."""

_SELDOM = 10_000
"""Collections of each generation between two collections of the next older one."""

_lock = threading.Lock()
_inside = 0
_usual, _ours = (0, 0, 0), (0, 0, 0)


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Context in which only young objects are collected; reentrant and usable by several threads."""
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
            if _inside == 0 and gc.get_threshold() == _ours:  # else the program has set other thresholds
                gc.set_threshold(*_usual)


def collect_younger() -> None:
    """Collects the objects created within :func:`fewer_collections`, unless the program disabled collection."""
    if _inside and gc.isenabled() and _usual[0] > 0:
        gc.collect(1)
