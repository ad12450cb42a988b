"""Replaces functions of torch temporarily."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(place: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which ``place.name`` is ``make(old value)``; replaces nothing if this torch has no such name."""
    before = getattr(place, name, None)
    if before is None:
        yield
        return
    setattr(place, name, make(before))
    try:
        yield
    finally:
        setattr(place, name, before)


@contextmanager
def setting(place: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which ``place.name`` is ``value``, also if there is no such name otherwise."""
    missing = object()
    before = vars(place).get(name, missing)
    setattr(place, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(place, name)
        else:
            setattr(place, name, before)
