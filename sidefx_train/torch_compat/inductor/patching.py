"""Replaces functions of torch, and targets of nodes, temporarily."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx


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


@contextmanager
def hidden(nodes: Iterable[fx.Node]) -> Iterator[None]:
    """Context in which nodes have a target that no pass looks for."""
    targets = {node: node.target for node in nodes}
    for node in targets:
        node.target = _kept
    try:
        yield
    finally:
        for node, target in targets.items():
            node.target = target


def _kept(*args: Any, **kwargs: Any) -> Any:
    """Stands for the target of an operation that a pass must leave alone."""
    raise AssertionError("a pass calls an operation that is hidden from it")
