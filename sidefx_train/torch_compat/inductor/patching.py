"""How functions of torch are replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(place: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``place.name`` is ``make(what it was)`` inside; where this torch has no such name, nothing is replaced."""
    before = getattr(place, name, None)
    if before is None:
        yield
        return
    setattr(place, name, make(before))
    try:
        yield
    finally:
        setattr(place, name, before)
