"""Captures and compiles a step for its specialization; every failure is a :class:`CaptureFailed`."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.native import start_build
from sidefx_train.compile.pipeline import capture_step, compile_capture, next_specialization
from sidefx_train.compile.pipeline.captured import CaptureBroke, Captured, CaptureFailed
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.pipeline.run_context import Call, RunContext
from sidefx_train.compile.runtime.describe import summary, user_location
from sidefx_train.compile.runtime.guard_failures import SpecializationState
from sidefx_train.config import CompileConfig
from sidefx_train.errors import BackendError

_Result = TypeVar("_Result")


class Capturer:
    """Captures one step.

    Args:
        fn: the step.
        name: its name in generated code.
        config: options.
        specialization: specialization state of the step.
        context: what its entries refer to when they run.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        config: CompileConfig,
        specialization: SpecializationState,
        context: RunContext,
    ) -> None:
        self._fn, self._name, self._config = fn, name, config
        self._specialization, self._context = specialization, context
        self._self_invalidated: set[str] = set()
        self._other: Specialization | None = None

    @property
    def deterministic(self) -> bool:
        """True if nothing may depend on timing or on earlier calls: a resumed run is the same."""
        return self._config.deterministic or torch.are_deterministic_algorithms_enabled()

    def capture_and_compile(self, call: Call) -> Entry:
        """Returns an entry for a call.

        Raises:
            CaptureFailed: the step cannot be captured or compiled.
            BackendError: it cannot be compiled, and the options ask for the error.
        """
        start_build()
        return self._or_otherwise(lambda spec: self._new_entry(spec, call))

    def trace(self, call: Call) -> Captured:
        """Returns a capture that is not compiled yet; raises :class:`CaptureFailed`."""

        def attempt(spec: Specialization) -> Captured:
            with self.failing_as_capture(spec):
                return self._capture(spec, call)

        return self._or_otherwise(attempt)

    def compile(self, captured: Captured, call: Call) -> Entry:
        """Returns the entry of a capture, compiled in this process; raises :class:`BackendError`."""
        return compile_capture.compile_captured(captured, self._config, self._context, call)

    def serves_one_call(self, captured: Captured) -> bool:
        """Returns True if the step invalidates its own guards: such a capture is compiled only when it occurs again."""
        if not captured.self_invalidated or self._config.backend != "inductor" or self.deterministic:
            return False
        again = captured.self_invalidated in self._self_invalidated
        self._self_invalidated.add(captured.self_invalidated)
        return not again

    @contextmanager
    def failing_as_capture(self, spec: Specialization) -> Iterator[None]:
        """Context that raises any exception as :class:`CaptureFailed`, except those that the caller wants to see."""
        try:
            yield
        except (CaptureFailed, KeyboardInterrupt):
            raise
        except BackendError as error:
            if self._config.strict and not spec.has_symbolic_sizes:
                raise
            stop = CaptureFailed("SFX201", error.reason, error.location, None)
            stop.of_backend = True
            raise stop from error
        except Exception as error:
            if os.environ.get("SIDEFX_DEBUG"):
                traceback.print_exc()
            raise _internal_failure(error) from error.__cause__ if isinstance(error, CaptureBroke) else error

    def _or_otherwise(self, attempt: Callable[[Specialization], _Result]) -> _Result:
        """Calls ``attempt`` with the current specialization; if the backend refuses what was captured, with others
        under which it may not, and with static sizes from now on."""
        spec = tried = self._specialization.current
        while True:
            try:
                return attempt(tried)
            except BackendError:  # the options ask for the error
                if self._other is None:
                    raise
                tried = self._other
                continue
            except CaptureFailed as error:
                other = self._other if error.code == "SFX201" else None
                if other is None and not spec.has_symbolic_sizes:
                    raise
                with_symbols = error
            if other is None:
                break
            tried = other
        # The symbolic sizes may be the cause: if static ones work, sizes are static from now on.
        try:
            result = attempt(self._specialization.with_static_sizes())
        except CaptureFailed:
            if with_symbols.holds is None:
                raise
            result = None
        if result is None:  # out of the handler: the first failure, whose guard says that it is one for all sizes
            raise with_symbols
        self._specialization.keep_sizes_static()
        return result

    def _new_entry(self, spec: Specialization, call: Call) -> Entry:
        """Returns an entry captured with ``spec``; keeps the specialization of the capture if it succeeds."""
        with self.failing_as_capture(spec):
            captured = self._capture(spec, call)
            once = self.serves_one_call(captured)
            config = replace(self._config, backend="aot_eager") if once else self._config
            if self.deterministic:
                config = replace(config, deterministic=True, autotune="off")
            entry = compile_capture.compile_captured(captured, config, self._context, call)
            entry.once = once
        self._specialization.current = captured.specialization
        return entry

    def _capture(self, spec: Specialization, call: Call) -> Captured:
        in_order = self._config.backend_name in ("eager", "aot_eager")
        self._other = None
        in_parts = not self._config.strict  # a step may be split at graph breaks; where that fails, it runs eagerly
        captured = capture_step.capture(self._fn, *call, self._name, spec, in_parts, in_order)
        self._other = next_specialization.after_refusal(captured.specialization, captured.traced)
        return compile_capture.partitioned(captured, self._config)


def _internal_failure(error: Exception) -> CaptureFailed:
    """Returns the failure that an unexpected exception is: of a capture, or of the compilation of its graph."""
    if not isinstance(error, CaptureBroke):
        stop = CaptureFailed("SFX204", summary(error), user_location(error), None, raised=True)
        stop.of_backend = True
        return stop
    cause = error.__cause__
    assert cause is not None, "it was raised from another error"
    return CaptureFailed("SFX204", summary(cause), user_location(cause), error.holds, raised=True)
