"""Warnings of code that is none of the program's: torch's, while it compiles.

They are neither shown nor made errors by the program's filters. ``warnings.catch_warnings`` would do that for all
threads, and have the program's own warnings shown again, since it makes Python forget which it has shown.
"""

from __future__ import annotations

import sys
import threading
import warnings
from _warnings import warn_explicit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sidefx_train.errors import SideFXWarning


class _OfThreads(type):
    """Metaclass of a class that has all warnings of some threads as subclasses, but for this library's own."""

    idents: list[int]

    def __subclasscheck__(cls, category: type) -> bool:
        return threading.get_ident() in cls.idents and not issubclass(category, SideFXWarning)


class _Silent(Warning, metaclass=_OfThreads):
    """The category of a filter."""

    idents: list[int] = []


_FILTER: Any = ("ignore", None, _Silent, None, 0)


@contextmanager
def no_warnings() -> Iterator[None]:
    """Inside, nothing warns in the current thread but this library; may be entered again, and by several threads."""
    ident = threading.get_ident()
    _Silent.idents.append(ident)
    warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]
    version, filters = _version(), list(warnings.filters)
    try:
        yield
    finally:
        if filters == warnings.filters:
            _keep_shown(version, _version())
        _Silent.idents.remove(ident)
        if _FILTER in warnings.filters:  # else the program has restored filters of its own since
            warnings.filters.remove(_FILTER)  # type: ignore[attr-defined]


def _version() -> int | None:
    """Returns the number of times that filters were changed; called where warnings are ignored."""
    registry: dict[Any, Any] = {}
    warn_explicit("", Warning, "", 1, registry=registry)
    return registry.get("version")


def _keep_shown(before: int | None, now: int | None) -> None:
    """Keeps what modules have shown, though filters were changed and restored since.

    ``subprocess`` does that for each compiler that it starts. Python then forgets what it has shown.
    """
    if before == now or now is None:
        return
    for module in list(sys.modules.values()):
        registry = getattr(module, "__dict__", {}).get("__warningregistry__")
        if type(registry) is dict and registry.get("version") == before:
            registry["version"] = now


def matches(pattern: Any, text: str) -> bool:
    """Whether a message or module name fits that of a filter, as Python has it: plain text is compared as a whole."""
    return pattern is None or (pattern == text if type(pattern) is str else bool(pattern.match(text)))
