"""Files in a cache that several processes need at the same time: one makes each, the others wait or go without.

:func:`made_once` waits. Its lock is a POSIX record lock on one byte of a file in the cache folder, another byte for
each file that is made. The system releases it when its process ends, however that happens, and a fork does not inherit
it. Closing the file anywhere in a process releases all its locks, so the file stays open.

:func:`claim` does not wait, and its lock lasts as long as a process that is given the file: BSD's ``flock``.

Where the folder has no such locks, every process makes its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

PATIENCE = 900.0
"""Seconds after which a process that waits for another one makes the file itself."""

_files: dict[Path, int] = {}
_INTERVAL = 0.05
_FILE = "locks"
_DIGITS = 15
"""Hexadecimal digits of an identity that choose the byte: fewer than an offset in a file may have."""


@contextmanager
def made_once(folder: Path, identity: str, is_made: Callable[[], bool]) -> Iterator[bool]:
    """Context in which a process makes something, or finds it: it is entered when no other process makes it.

    Args:
        folder: folder of the cache.
        identity: hash, in hexadecimal digits, of all that it is made from.
        is_made: returns True if the cache contains it: then processes need not go one by one.

    Yields:
        True if another process has made it.
    """
    if is_made():
        yield True
        return
    if fcntl is None:
        yield False
        return
    try:
        file = _opened(folder / _FILE)
    except OSError:
        yield False
        return
    byte = int(identity[:_DIGITS], 16)
    locked = _lock(file, byte)
    try:
        made = locked and is_made()
        if made:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)
        yield made
    finally:
        if locked:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)


def _opened(path: Path) -> int:
    """Returns the descriptor of the file with the locks, which stays open."""
    file = _files.get(path)
    if file is None or not path.exists() or not os.path.samestat(os.fstat(file), path.stat()):
        file = _files[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    return file


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


@contextmanager
def claim(path: Path) -> Iterator[TextIOWrapper | None]:
    """Context with an open file that is locked until it is closed here and in every process that inherited it.

    Yields:
        The file, whose descriptor can be passed to a process; ``None`` if another process has it.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        except OSError:  # a file system without locks
            pass
        yield file
