"""Warnings that C code issues in a step, most of them torch's.

They reach Python's filters with the innermost frame of Python, which is this module's. A filter takes them, and they
are issued for the program's file and line. Those of torch are issued immediately, and again after each replay if this
process has met the text twice: code of torch often warns once per process, and does not say so; a text that comes again
belongs to no such warning. Other C code warns each time, as ``warnings.warn`` does.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.interpreter.builtins.warn import WarningSite, place
from sidefx_train.compile.capture.world.deferred import deferred_warnings
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


class _Calls(threading.local):
    """The call of this thread whose warnings are taken, and the text of the warning that is looked at.

    ``of_numpy`` is True once Python code of NumPy's, which the C code has called, has warned for a line of its own.
    """

    found: list[tuple[str, type[Warning]]] | None = None
    text: str | None = None
    of_numpy = False


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
            _CALLS.of_numpy |= _CALLS.text is not None and module.startswith("numpy.")
            _CALLS.text = None
        return _CALLS.text is not None or _CALLS.of_numpy


class _Kinds(type):
    """Metaclass of the filter's category. Python asks for it last, in every version from 3.10 to 3.13."""

    def __subclasscheck__(cls, category: type[Warning]) -> bool:
        text, _CALLS.text = _CALLS.text, None
        if text is None or _CALLS.found is None:
            return _CALLS.of_numpy
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
        Unsupported: Python code of NumPy's has warned for a line of its own.
    """
    outer, found = (_CALLS.found, _CALLS.of_numpy), []  # type: ignore[var-annotated]
    _CALLS.found, _CALLS.of_numpy = found, False
    warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]
    try:
        return fn(*args, **kwargs)
    finally:
        (_CALLS.found, _CALLS.of_numpy), of_numpy = outer, _CALLS.of_numpy
        if _FILTER in warnings.filters:  # else another thread has restored its filters since
            warnings.filters.remove(_FILTER)  # type: ignore[attr-defined]
        if of_numpy:
            world.heap.refuse("SFX111", f"{trace_rules.describe(fn)} runs code of NumPy that warns")
        for text, category in found:
            of_torch = trace_rules.is_torch_callable(fn) or any(safe_isinstance(value, torch.Tensor) for value in args)
            _issue(world, text, category, may_be_once=of_torch)


def _issue(world: CaptureContext, text: str, category: type[Warning], may_be_once: bool) -> None:
    if text.startswith(_OF_SHADOWS):
        return
    site = place(world.interp, 1)
    if not may_be_once:
        deferred_warnings.warn_at(world, site, text, category)
        return
    _MET[text] = _MET.get(text, 0) + 1
    filters = deferred_warnings.filters_of_step(world)
    if filters is not None:
        deferred_warnings.warn_now(world, filters, site, text, category, may_be_once=_MET[text] < 2)
        return
    site(text, category)
    world.defer(RepeatedWarning(site, text, category), (), {})


def check(world: CaptureContext) -> None:
    """Refuses a step that leaves other filters than those for which it has warned: its warnings are issued at its end.

    Raises:
        Unsupported: it does.
    """
    kinds = (WarningSite, RepeatedWarning)
    if deferred_warnings.sets_filters(world) and any(safe_isinstance(call.fn, kinds) for call in world.deferred):
        world.heap.refuse("SFX111", "warns, and changes the filters of warnings afterwards")


@contextmanager
def untouched_filters() -> Iterator[None]:
    """Inside, the program's code runs in a call of C code and sees its own filters."""
    outer, _CALLS.found, _CALLS.of_numpy = (_CALLS.found, _CALLS.of_numpy), None, False
    before = len(warnings.filters)
    warnings.filters[:] = [each for each in warnings.filters if each is not _FILTER]  # type: ignore[index]
    taken = before - len(warnings.filters)
    try:
        yield
    finally:
        _CALLS.found, _CALLS.of_numpy = outer
        warnings.filters[:0] = [_FILTER] * taken  # type: ignore[index]
