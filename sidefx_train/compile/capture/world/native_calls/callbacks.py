"""Callbacks: functions that C code calls in place of the program's, and that lead back into the interpreter."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train.compile.capture.recording import warning_watch
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.native_calls import cpp_warnings
from sidefx_train.compile.capture.world.symbolic_numbers import concrete_numbers
from sidefx_train.compile.common.sentinels import NATIVE_CODE


class Callbacks:
    """The callbacks of one capture.

    Attributes:
        reenter: what each of them calls in the interpreter.
    """

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.reenter: list[Callable[..., Any]] = []

    def make(self, fn: Any, reenter: Callable[..., Any]) -> Any:
        """Returns a function that calls ``reenter``, for C code to call in place of ``fn``."""
        # A weak reference: autograd graphs hold such functions, and the world holds tensors with these graphs, a cycle
        # that Python's collector cannot see completely.
        number, world = len(self.reenter), weakref.ref(self.world)
        self.reenter.append(reenter)

        def reentry_callback(*args: Any, **kwargs: Any) -> Any:
            alive = world()
            assert alive is not None, f"{fn!r} is called after its capture"
            call = alive.callbacks.reenter[number]
            swapped, watch = alive.reentry.swapped, warning_watch.suspend()
            try:
                with cpp_warnings.untouched_filters(), alive.modes.running(False), alive.functions.running(False):
                    answer = alive.reentry.outside(lambda: call(*args, **kwargs)) if swapped else call(*args, **kwargs)
            finally:
                warning_watch.resume(watch)
            if type(answer) is torch.SymBool or alive.answers_values:  # C code may compare it
                answer = concrete_numbers.concrete_within(answer)
            return alive.reentry.handed(answer)

        NATIVE_CODE.add(id(reentry_callback.__code__))
        vars(reentry_callback)["leads_to"] = fn
        return reentry_callback
