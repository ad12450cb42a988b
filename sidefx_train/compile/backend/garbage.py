"""When Python looks for garbage while a graph is compiled.

Imports and graphs make hundreds of thousands of objects that stay, so that Python looks through all there are again and
again: a fifth of the time of lowering. Here it looks among young objects only, and seldom, and through all of them, if
that is due by its own rule, once the C++ compiler runs and there is nothing else to do.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 20_000
"""Objects made between two collections of young ones."""

_SELDOM = 10_000
"""Collections of middle-aged objects between two of old ones."""

_usual: tuple[int, int, int] | None = None


@contextmanager
def fewer_collections() -> Iterator[None]:
    """No collection of old objects, but in :func:`collect_if_due`; entered by one thread at a time."""
    global _usual
    young, middle, old = _usual = gc.get_threshold()
    gc.set_threshold(max(young, _YOUNG) if young else 0, middle, max(old, _SELDOM))
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        _usual = None


def collect_if_due() -> None:
    """Within :func:`fewer_collections`: Python collects now what it would have collected without it.

    What is due is for Python to say, which it does where enough objects have been made; none is made if the program has
    switched collections off.
    """
    if _usual is None or not gc.isenabled() or _usual[0] == 0:
        return
    seldom = gc.get_threshold()
    gc.set_threshold(*_usual)
    try:
        for _ in range(2):  # old objects are due once middle-aged ones have joined them
            made: list[list[int]] = [[] for _ in range(_usual[0] + 1)]
            made.clear()
    finally:
        gc.set_threshold(*seldom)
