"""Processes that need the same graph at the same time: one lowers it, the others wait and find it in a cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from sidefx_train import disk_cache
from sidefx_train.compile.common.process_locks import made_once


def compiling(identity: str | None, is_made: Callable[[], bool]) -> AbstractContextManager[bool]:
    """Context in which a process lowers a graph, or finds it: it is entered when no other process lowers it.

    Args:
        identity: hash of the graph with all that lowering reads; ``None``: nothing is waited for.
        is_made: returns True if the caches contain the graph: then processes need not go one by one.

    Returns:
        A context whose value is True if another process has lowered it meanwhile.
    """
    return nullcontext(False) if identity is None else made_once(disk_cache.cache_dir(), identity, is_made)


def mark_made(identity: str) -> None:
    """Says that Inductor's cache contains what this library's does not keep."""
    disk_cache.store("other", _marker(identity), True, "a graph in Inductor's cache")


def is_marked(identity: str) -> bool:
    """Returns True if :func:`mark_made` has been called for the graph, by any process."""
    return disk_cache.load("other", _marker(identity)) is not None


def _marker(identity: str) -> str:
    return f"made-{identity}"
