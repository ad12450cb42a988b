"""Warnings that C code issues in a step, most of them torch's.

They reach Python's filters with the innermost frame of Python, which is this module's. A filter takes them, and they
are issued for the program's file and line: immediately, and again after each replay if this process has met the text
twice. Code of torch often warns once per process, and does not say so; a text that comes again belongs to no such
warning. Other C code warns each time.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.interpreter.builtins.warn import WarningSite, place
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


class _Calls(threading.local):
    """The call of this thread whose warnings are taken, and the text of the warning that is looked at."""

    found: list[tuple[str, type[Warning]]] | None = None
    text: str | None = None


_CALLS = _Calls()


class _Text:
    """The pattern of the filter's message."""

    def match(self, text: str) -> bool:
        _CALLS.text = None if _CALLS.found is None else text
        return _CALLS.text is not None


class _Module:
    """The pattern of the filter's module."""

    def match(self, module: str) -> bool:
        if module != __name__:
            _CALLS.text = None
        return _CALLS.text is not None


class _Kinds(type):
    """Metaclass of the filter's category. Python asks for it last, in every version from 3.10 to 3.13."""

    def __subclasscheck__(cls, category: type[Warning]) -> bool:
        text, _CALLS.text = _CALLS.text, None
        if text is None or _CALLS.found is None:
            return False
        _CALLS.found.append((text, category))
        return True


class _Taken(Warning, metaclass=_Kinds):
    """The filter's category."""


_FILTER: Any = ("ignore", _Text(), _Taken, _Module(), 0)
_OF_SHADOWS = "The given NumPy array is not writ"
"""Arrays of the program are shown to C code as read-only copies; the tensors made of these are no results."""
_MET: dict[str, int] = {}
"""How often each text was met in this process."""


class RepeatedWarning:
    """A warning of C code that replays issue again.

    Args:
        site: the program's line.
        text: the message.
        category: its class.
    """

    def __init__(self, site: WarningSite, text: str, category: type[Warning]) -> None:
        self.site = site
        self.text = text
        self.category = category
        self.issued_by_the_capture = True
        self.__qualname__ = self.__name__ = "warn"

    def __call__(self) -> None:
        if self.issued_by_the_capture:
            self.issued_by_the_capture = False
        elif _MET[self.text] > 1:
            self.site(self.text, self.category)


def call(world: CaptureContext, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls C code; its warnings are issued for the program's line.

    Raises:
        Warning: a filter makes one an error.
    """
    outer, found = _CALLS.found, []  # type: ignore[var-annotated]
    _CALLS.found = found
    warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]
    try:
        return fn(*args, **kwargs)
    finally:
        _CALLS.found = outer
        if _FILTER in warnings.filters:  # else another thread has restored its filters since
            warnings.filters.remove(_FILTER)  # type: ignore[attr-defined]
        for text, category in found:
            of_torch = trace_rules.is_torch_callable(fn) or any(safe_isinstance(value, torch.Tensor) for value in args)
            _issue(world, text, category, may_be_once=of_torch)


def _issue(world: CaptureContext, text: str, category: type[Warning], may_be_once: bool) -> None:
    if text.startswith(_OF_SHADOWS):
        return
    _MET[text] = _MET.get(text, 0) + (1 if may_be_once else 2)
    site = place(world.interp, 1)
    site(text, category)
    world.defer(RepeatedWarning(site, text, category), (), {})


@contextmanager
def untouched_filters() -> Iterator[None]:
    """Inside, the program's code runs in a call of C code and sees its own filters."""
    outer, _CALLS.found = _CALLS.found, None
    before = len(warnings.filters)
    warnings.filters[:] = [each for each in warnings.filters if each is not _FILTER]  # type: ignore[index]
    taken = before - len(warnings.filters)
    try:
        yield
    finally:
        _CALLS.found = outer
        warnings.filters[:0] = [_FILTER] * taken  # type: ignore[index]
