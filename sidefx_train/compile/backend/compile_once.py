"""Processes that need the same graph at the same time: one lowers it, the others wait and find it in a cache.

The lock is a POSIX record lock on one byte of a file in the cache folder, another byte for each graph. The system
releases it when its process ends, however that happens, and a fork does not inherit it. Where the folder has no such
locks, every process lowers for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sidefx_train import disk_cache

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

PATIENCE = 900.0
"""Seconds after which a process that waits for another one lowers the graph itself."""

_INTERVAL = 0.05
_FILE = "locks"
_DIGITS = 15
"""Hexadecimal digits of an identity that choose the byte: fewer than an offset in a file may have."""


@contextmanager
def compiling(identity: str | None, is_made: Callable[[], bool]) -> Iterator[bool]:
    """Context in which a process lowers a graph, or finds it: it is entered when no other process lowers it.

    Args:
        identity: hash of the graph with all that lowering reads; ``None``: nothing is waited for.
        is_made: returns True if the caches contain the graph: then processes need not go one by one.

    Yields:
        True if another process has lowered it meanwhile.
    """
    if identity is None or fcntl is None or is_made():
        yield False
        return
    try:
        file = (disk_cache.cache_dir() / _FILE).open("a")
    except OSError:
        yield False
        return
    byte = int(identity[:_DIGITS], 16)
    with file:
        made = _lock(file.fileno(), byte) and is_made()
        if made:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)
        yield made


def _lock(file: int, byte: int) -> bool:
    """Waits for the lock; returns False if there is none to be had."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            time.sleep(_INTERVAL)
        except OSError:
            return False
        else:
            return True
    return False


def mark_made(identity: str) -> None:
    """Says that Inductor's cache contains what this library's does not keep."""
    disk_cache.store("other", _marker(identity), True, "a graph in Inductor's cache")


def is_marked(identity: str) -> bool:
    """Returns True if :func:`mark_made` has been called for the graph, by any process."""
    return disk_cache.load("other", _marker(identity)) is not None


def _marker(identity: str) -> str:
    return f"made-{identity}"
