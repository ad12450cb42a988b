"""Signal handlers of the program that raise while a step is captured: a timeout, a data loader whose worker died.

Python calls a handler between two instructions of the main thread, here somewhere in the capture, whose own ``except``
blocks take an exception for one of the step. The program gets it instead, as if the signal had arrived at the call.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class HandlerRaised(BaseException):
    """Carries the exception of a handler through code that handles every ``Exception``.

    Attributes:
        error: the exception.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class _Carrying:
    """Installed in place of a handler; its exceptions are carried."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler

    def __call__(self, *args: Any) -> Any:
        try:
            return self.handler(*args)
        except BaseException as error:
            raise HandlerRaised(error) from None


def interruptible(fn: Callable[..., _Result], *args: Any) -> _Result:
    """Calls ``fn``; an exception of a signal handler ends it and is raised from here, whatever ``fn`` handles.

    A handler that is replaced meanwhile stays replaced.
    """
    if threading.current_thread() is not threading.main_thread():
        return fn(*args)  # handlers run in the main thread
    installed: dict[int, _Carrying] = {}
    try:
        try:
            for number, handler in _handlers():
                installed[number] = _Carrying(handler)
                signal.signal(number, installed[number])
            return fn(*args)
        finally:
            for number, carrying in installed.items():
                current: object = signal.getsignal(number)
                if current is carrying:
                    signal.signal(number, carrying.handler)
    except HandlerRaised as caught:
        carried = caught.error
    raise carried  # outside the block above: what it handled is not the context


def raised(error: BaseException) -> bool:
    """Returns True if a signal handler that is installed now raised ``error``."""
    if error.__traceback__ is None or threading.current_thread() is not threading.main_thread():
        return False
    running = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return any(_code(handler) in running for _, handler in _handlers())


def _handlers() -> list[tuple[int, Callable[..., Any]]]:
    found = ((number, signal.getsignal(number)) for number in range(1, signal.NSIG))
    return [(number, handler) for number, handler in found if callable(handler)]


def _code(handler: Callable[..., Any]) -> Any:
    """Returns the code that calling ``handler`` runs, or ``None`` if that is written in C."""
    function = getattr(handler, "func", handler)  # of a functools.partial
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return code if code is not None else getattr(type(function).__call__, "__code__", None)
