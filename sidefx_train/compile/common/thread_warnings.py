"""Warnings of code that is none of the program's: torch's, while it compiles.

They are neither shown nor made errors by the program's filters. ``warnings.catch_warnings`` would do that for all
threads, and have the program's own warnings shown again, since it makes Python forget which it has shown.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Threads:
    """Stands for a pattern in a filter of warnings: it matches all that some threads warn of."""

    def __init__(self) -> None:
        self.idents: list[int] = []

    def match(self, text: str) -> bool:
        return threading.get_ident() in self.idents


_silent = _Threads()
_FILTER: Any = ("ignore", _silent, Warning, None, 0)


@contextmanager
def no_warnings() -> Iterator[None]:
    """Nothing that the current thread does inside warns; may be entered again, and by several threads."""
    ident = threading.get_ident()
    _silent.idents.append(ident)
    warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _silent.idents.remove(ident)
        if _FILTER in warnings.filters:  # else the program has restored filters of its own since
            warnings.filters.remove(_FILTER)  # type: ignore[attr-defined]


def matches(pattern: Any, text: str) -> bool:
    """Whether a message or module name fits that of a filter, as Python has it: plain text is compared as a whole."""
    return pattern is None or (pattern == text if type(pattern) is str else bool(pattern.match(text)))
