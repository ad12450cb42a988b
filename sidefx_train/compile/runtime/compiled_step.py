"""The compiled step: the object that the user calls."""

from __future__ import annotations

import copy
import functools
import gc
import os
import statistics
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.kinds import describe
from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.capture.interpreter.exceptions import of_the_program
from sidefx_train.compile.capture.interpreter.generator_finalizers import has_pending_finally
from sidefx_train.compile.capture.resume.driver import Parts
from sidefx_train.compile.capture.shadows.deferred_values import message_of
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.graph.artifacts import Executable
from sidefx_train.compile.native import guards_module, native_module, native_ready, products_module, start_build
from sidefx_train.compile.pipeline import compile_capture
from sidefx_train.compile.pipeline.captured import Captured, CaptureFailed
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.residual.generate import MISS
from sidefx_train.compile.runtime import background_compile
from sidefx_train.compile.runtime.background_compile import Job
from sidefx_train.compile.runtime.capture_report import record_capture
from sidefx_train.compile.runtime.describe import callers_level, describable, name_of, short, summary, user_location
from sidefx_train.compile.runtime.entry_holder import Holder, hold
from sidefx_train.compile.runtime.finalizer_check import observable_finalization
from sidefx_train.compile.runtime.guard_failures import Missed, specialized_after
from sidefx_train.config import CompileConfig
from sidefx_train.errors import (
    FOLLOWING,
    AssumptionFailed,
    BackendError,
    GraphBreakError,
    Location,
    RecaptureLimitError,
    SideFXWarning,
    UnfinishedError,
    VerificationError,
)
from sidefx_train.gc_control import fewer_collections
from sidefx_train.report import StepReport

_MAX_EARLY = 3
"""Limit of background captures before the step has created its state; then the capture creates it."""

_MAX_FAILED_JOBS = 2
"""Number of failing workers after which steps run eagerly for good."""

_PAYS = 100
"""Number of calls after which a capture was worth its time."""

_FEW, _SELDOM = 3, 50
"""Limits of failed assumptions: a total number, and one in this many calls."""


class CompiledStep:
    """A function whose whole training step runs as one captured graph.

    Called like the function it wraps. The first call captures and compiles. Later calls replay while everything the
    step read is unchanged, and capture again otherwise. A call that cannot be captured runs the function itself, and
    the report says why.

    Args:
        fn: function, bound method, ``nn.Module``, partial or callable object.
        config: options.
        part_of: the parts of the step if ``fn`` is a resume function.
    """

    def __init__(self, fn: Callable[..., Any], config: CompileConfig, part_of: Parts | None = None) -> None:
        if not callable(fn):
            raise TypeError(f"sidefx_train.compile needs a callable, got {type(fn).__name__}")
        self.config = config
        self._fn = fn
        self._name = name_of(fn)
        self._replays: list[Holder] = []
        self._last: Holder | None = None
        self._short_lived: list[str] = []
        self._exact = False
        self._ended: set[str] = set()
        self._stopped: list[CaptureFailed] = []
        self._specialization = Specialization(all_dynamic=bool(config.dynamic))
        self._warned: set[tuple[str, str]] = set()
        self._limits: dict[str, str] = {}
        self._hits = 0
        self._busy = False
        self._first_run = False
        self._forget_jobs()
        self._report = StepReport(name=self._name, backend=config.backend_name)
        self._is_part = part_of is not None
        self._parts = part_of if part_of is not None else Parts(self._make_part)
        functools.update_wrapper(self, fn if isinstance(fn, types.FunctionType) else describable(fn), updated=())
        self.__wrapped__ = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if compat.traced_by_dynamo():  # torch.compile or torch.cond traces the step: it inlines the function
            return self._fn(*args, **kwargs)
        try:
            for replay in self._replays:
                try:
                    result = replay(args, kwargs)
                except BaseException:  # from native code, or from the eager step
                    self._hits += 1
                    raise
                if result is not MISS:
                    self._hits += 1
                    return result
            return self._slow(args, kwargs)
        except BaseException as error:
            error.__traceback__ = of_the_program(error.__traceback__)
            raise

    def __get__(self, owner: Any, cls: type | None = None) -> Any:
        """Compiles a decorated method per instance."""
        if owner is None:
            return self
        bound = types.MethodType(self._fn, owner)
        key = f"_sidefx_compiled_{self._name.rpartition('.')[2]}"
        space = getattr(owner, "__dict__", None)
        if space is None:
            return CompiledStep(bound, self.config)
        step = space.get(key)
        if step is None or step.config is not self.config:
            step = CompiledStep(bound, self.config)
            space[key] = step
        return step

    @property
    def _entries(self) -> list[Entry]:
        """The entries, in the order in which calls try them."""
        entries = [holder.entry for holder in self._replays]
        return [entry for entry in entries if entry is not None]

    @property
    def _newest(self) -> Entry | None:
        """The latest entry; it explains misses."""
        return None if self._last is None else self._last.entry

    def __repr__(self) -> str:
        return f"<CompiledStep {self._name}: {len(self._entries)} entries>"

    def __copy__(self) -> CompiledStep:
        return CompiledStep(self._fn, self.config)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledStep:
        """Copies without captures, like pickling."""
        return CompiledStep(copy.deepcopy(self._fn, memo), self.config)

    def __reduce_ex__(self, protocol: Any) -> Any:
        found: Any = sys.modules.get(getattr(self._fn, "__module__", None) or "")
        name = getattr(self._fn, "__qualname__", "")
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (CompiledStep, (self._fn, self.config))

    def report(self) -> StepReport:
        """Returns the report: what has been captured, replayed and run eagerly so far."""
        report = self._report
        report.replays += self._hits
        report.calls += self._hits
        self._hits = 0
        if not self._is_part:
            for part in self._parts.steps():
                part.report()
        return report

    def reset(self) -> None:
        """Drops every captured graph, the specialization, and the report."""
        self._replays = []
        self._last = None
        self._short_lived.clear()
        self._exact = False
        self._ended.clear()
        self._stopped = []
        self._specialization = Specialization(all_dynamic=bool(self.config.dynamic))
        self._warned.clear()
        self._hits = 0
        self._forget_jobs()
        self._report = StepReport(name=self._name, backend=self.config.backend_name)
        if not self._is_part:
            self._parts = Parts(self._make_part)

    def end(self) -> None:
        """Stops the background compilation of this step; captured entries stay in use."""
        for step in (self, *(self._parts.steps() if not self._is_part else [])):
            job, step._job = step._job, None
            if job is not None:
                job.end()

    def _forget_jobs(self) -> None:
        self._job: Job | None = None
        self._job_trigger: Missed | None = None
        self._has_run = False
        self._early_captures = 0
        self._failed_jobs = 0
        self._disagreements = 0

    def dispatch_seconds(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Times the overhead of a replay over the graph, in seconds per call, with this call's arguments.

        Returns:
            ``"guards"``: guards and prologue. ``"dispatch"``: those and the epilogue, with constant outputs of the
            graph; absent for a step whose epilogue changes something, since nothing is run or changed here. Empty if no
            entry fits the arguments.
        """
        for entry in self._entries:
            if entry.fetch(args, kwargs) is MISS:
                continue
            found = {"guards": _seconds_per_call(entry.fetch, args, kwargs)}
            if not entry.captured.effects:
                still = [torch.zeros(()) for _ in entry.captured.residual.outputs]
                found["dispatch"] = _seconds_per_call(entry.over(lambda inputs: still), args, kwargs)
            return found
        return {}

    # --- slow path: no entry fits --------------------------------------------------------------------------------

    def _slow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._busy:  # recursive call
            return self._fn(*args, **kwargs)
        self._report.calls += 1
        around = compat.unsupported_ambient_mode()
        if around is not None:
            return self._eager(CaptureFailed("SFX111", around, None, None), args, kwargs)
        for stop in self._stopped:
            if stop.holds is not None and stop.holds(args, kwargs):
                return self._eager(stop, args, kwargs)
        if self.config.warmup == "background" and not self._deterministic:
            return self._compile_in_background(args, kwargs)
        return self._captured_now(args, kwargs)

    def _captured_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Captures, compiles and runs the step."""
        missed = self._update_specialization(args, kwargs)
        if self._at_limit:
            return self._over_limit(missed, args, kwargs)
        if self._failed_jobs >= _MAX_FAILED_JOBS:  # each attempt takes as long as one that succeeds
            return self._eager(next(s for s in reversed(self._stopped) if s.code == "SFX201"), args, kwargs)
        began = time.perf_counter()
        refused: CaptureFailed | None = None
        with ExitStack() as quiet:
            quiet.enter_context(fewer_collections())
            try:
                entry = self._make_entry(args, kwargs)
            except CaptureFailed as stop:
                refused = stop
            if refused is not None or entry.captured.suspension is not None:  # the program's own code runs
                quiet.close()
            self._let_go(refused, args)
            if refused is not None:  # not in the handler: the step's own exceptions must not have ours as context
                self._stop(refused)
                self._failed_jobs += refused.code == "SFX201"
                return self._eager(refused, args, kwargs)
            self._failed_jobs = 0
            if missed is not None:
                label, old, new, location = missed
                self._report.record_recapture(label, old, new, location, time.perf_counter() - began)
            self._record(entry, missed)
            try:
                result = self._first_replay(entry, args, kwargs)
            finally:
                if entry.once:
                    self._retire(entry)
        if result is MISS:
            found = entry.why(args, kwargs)
            what = f"{describe(found[0])}, found {short(found[1])}" if found else "the global state differs"
            self._drop(entry)
            unstable = CaptureFailed("SFX204", f"a guard does not hold right after the capture: {what}", None, None)
            return self._eager(unstable, args, kwargs)
        return result

    @property
    def _at_limit(self) -> bool:
        """True if the step must not be captured again."""
        limit = self.config.recapture_limit
        return len(self._replays) + len(self._short_lived) >= limit or len(self._stopped) >= 4 * limit

    def _stop(self, refused: CaptureFailed) -> None:
        """Remembers a capture that failed: equal calls run eagerly."""
        if refused.holds is not None:
            holds = refused.holds
            refused.holds = hold(holds.holds, holds, (), holds.guards, False, _nothing_more)
        self._stopped.append(refused)

    def _let_go(self, refused: CaptureFailed | None, args: tuple[Any, ...]) -> None:
        """Releases references of a finished capture: the step's objects must be finalized where eager drops them."""
        if refused is not None and not self._strict:
            for error in (refused, refused.__cause__):
                if error is not None:
                    error.__traceback__ = None
        if self._is_part and any(has_pending_finally(value) for part in args[0] for value in part):
            gc.collect()

    @property
    def _deterministic(self) -> bool:
        """True if nothing may depend on timing or on earlier calls: a resumed run is the same."""
        return self.config.deterministic or torch.are_deterministic_algorithms_enabled()

    @property
    def _strict(self) -> bool:
        return self.config.fullgraph or self.config.on_failure == "raise"

    def _first_replay(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an entry for the first time; returns :data:`MISS` if its guards do not hold."""
        self._first_run = True
        try:
            result = entry.replay(args, kwargs)
        except BaseException:
            if entry.fresh:  # native code after a break raised
                entry.fresh = False
                self._report.replays += 1
            raise
        finally:
            self._first_run = False
        if result is not MISS and entry.fresh:
            entry.fresh = False
            self._report.replays += 1
        return result

    def _make_entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        self._busy = True
        start_build()
        try:
            entry = self._captured_entry(args, kwargs)
        finally:
            self._busy = False
        self._add(entry)
        return entry

    def _add(self, entry: Entry) -> None:
        self._last = self._held(entry)
        known = [(holder, holder.entry) for holder in (self._last, *self._replays)]
        pairs = [(holder, entry) for holder, entry in known if entry is not None]
        # Exact entries first: a dynamic one is for sizes without an entry of their own.
        self._replays = [holder for holder, _ in sorted(pairs, key=lambda pair: pair[1].captured.symbolic_sizes)]

    def _held(self, entry: Entry) -> Holder:
        began = self._report.calls + self._hits

        def ended(holder: Holder, label: str) -> None:
            self._forget(holder, label, self._report.calls + self._hits - began)

        def built(holder: Holder) -> None:
            again = self._held(holder.entry)
            self._replays = [again if known is holder else known for known in self._replays]
            if self._last is holder:
                self._last = again

        return hold(entry.replay, entry, entry.shared, entry.guards, MISS, ended, built)

    def _forget(self, holder: Holder, label: str, calls: int) -> None:
        """Forgets an entry for objects that the program dropped; an entry with few calls still counts as a capture."""
        self._replays = [known for known in self._replays if known is not holder]
        if calls < _PAYS:
            self._short_lived.append(label)
        if self._is_part:  # a loop over modules created at every call
            self._specialization = replace(self._specialization, refetched=self._specialization.refetched | {label})

    def _captured_entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        return self._or_exact(lambda spec: self._entry_by(spec, args, kwargs))  # type: ignore[no-any-return]

    def _or_exact(self, attempt: Callable[[Specialization], Any]) -> Any:
        """Calls ``attempt`` with the current specialization; if symbolic sizes fail, with static ones from now on."""
        spec = self._specialization
        try:
            return attempt(spec)
        except CaptureFailed:
            if not spec.has_symbolic_sizes:
                raise
        # The symbolic sizes may be the cause: if exact ones work, sizes are exact from now on.
        done = attempt(replace(spec, dynamic_sizes=frozenset(), all_dynamic=False))
        self._exact = True
        return done

    def _entry_by(self, spec: Specialization, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Captures an entry with ``spec``; keeps the specialization of the capture if it succeeds."""
        with self._as_failed_capture(spec):
            captured = self._capture(spec, args, kwargs)
            once = self._serves_one_call(captured)
            config = replace(self.config, backend="aot_eager") if once else self.config
            if self._deterministic:
                config = replace(config, deterministic=True, autotune="off")
            entry = compile_capture.compile_captured(
                captured, config, self._failed, self._differs, args, kwargs, self._parts, self._is_part
            )
            entry.once = once
        self._specialization = captured.specialization
        return entry

    def _serves_one_call(self, captured: Captured) -> bool:
        """Returns True if the step invalidates its own guards: such a capture is compiled only when it occurs again."""
        if not captured.ends or self.config.backend != "inductor" or self._deterministic:
            return False
        again = captured.ends in self._ended
        self._ended.add(captured.ends)
        return not again

    def _capture(self, spec: Specialization, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        exact = self.config.backend_name in ("eager", "aot_eager")
        captured = compile_capture.capture(self._fn, args, kwargs, self._name, spec, self._in_parts, exact)
        return compile_capture.partitioned(captured, self.config)

    @property
    def _in_parts(self) -> bool:
        """True if a step may be split at graph breaks; where that fails, it runs eagerly."""
        return not self._strict

    @contextmanager
    def _as_failed_capture(self, spec: Specialization) -> Iterator[None]:
        """Context that raises any exception as :class:`CaptureFailed`, except those that the caller wants to see."""
        try:
            yield
        except (CaptureFailed, KeyboardInterrupt):
            raise
        except BackendError as error:
            if not self._in_parts and not spec.has_symbolic_sizes:
                raise
            raise CaptureFailed("SFX201", error.reason, error.location, None) from error
        except Exception as error:
            if os.environ.get("SIDEFX_DEBUG"):
                traceback.print_exc()
            raise CaptureFailed("SFX204", summary(error), user_location(error), None, raised=True) from error

    # --- background capture --------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until no background compilation of this step runs; the next call uses the result.

        With ``warmup="background"`` the first call runs eagerly, the second starts a worker, and later calls replay
        once the worker is done. With an empty cache the library's own modules are compiled first: then the call after
        this one starts the worker.

        Args:
            timeout: seconds to wait at most.

        Returns:
            False if a worker is still busy.
        """
        if self._has_run or self._entries:
            native_ready()
            products_module()
            native_module()
            guards_module()
        steps = [self, *(self._parts.steps() if not self._is_part else [])]
        return all(step._job is None or step._job.wait(timeout) for step in steps)

    def _compile_in_background(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the step eagerly and captures it in the background: traced between two steps, compiled by a worker."""
        if self._job is not None:
            if not self._job.done():
                return self._meanwhile(args, kwargs)
            entry = self._finished_entry(args, kwargs)
            result = MISS if entry is None else self._first_replay(entry, args, kwargs)
            if result is not MISS:
                return result
            if self._job is not None:
                return self._meanwhile(args, kwargs)
        first, self._has_run = not self._has_run, True
        if not native_ready() or first or self._failed_jobs >= _MAX_FAILED_JOBS:
            return self._meanwhile(args, kwargs)  # the first step creates state: gradients, optimizer state, buffers
        missed = self._update_specialization(args, kwargs)
        if self._at_limit:
            return self._over_limit(missed, args, kwargs)
        began = time.perf_counter()
        refused: CaptureFailed | None = None
        try:
            entry = self._begin_job(missed, args, kwargs)
        except CaptureFailed as stop:
            refused = stop
        self._let_go(refused, args)
        if refused is not None:
            self._stop(refused)
            return self._eager(refused, args, kwargs)
        if missed is not None:
            label, old, new, location = missed
            self._report.record_recapture(label, old, new, location, time.perf_counter() - began)
        result = MISS if entry is None else self._first_replay(entry, args, kwargs)
        return self._meanwhile(args, kwargs) if result is MISS else result

    def _begin_job(self, missed: Missed | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | None:
        """Traces and starts a worker; returns an entry if the compiled graph is in the cache."""

        def attempt(spec: Specialization) -> Captured:
            with self._as_failed_capture(spec):
                return self._capture(spec, args, kwargs)

        self._busy = True
        try:
            captured = self._or_exact(attempt)
            if captured.commits and self._early_captures < _MAX_EARLY:  # the step is about to create that state itself
                self._early_captures += 1
                return None
            self._specialization = captured.specialization
            if self._serves_one_call(captured):
                return None
            with self._as_failed_capture(captured.specialization):
                if captured.commits:  # no step creates it, for example a skipped update
                    entry = compile_capture.compile_captured(
                        captured, self.config, self._failed, self._differs, args, kwargs, self._parts, self._is_part
                    )
                    self._job_trigger = missed
                    return self._taken_over(entry)
                checks = compile_capture.guard_checks(captured, args, kwargs)
                known = background_compile.taken(captured, self.config, self._differs)
                if known is None:
                    self._job = background_compile.start(
                        captured,
                        checks,
                        self.config,
                        self._differs,
                        lambda: compile_capture.fetched(captured, checks, args, kwargs),
                    )
                    self._job_trigger = missed
                    return None
        finally:
            self._busy = False
        self._job_trigger = missed
        return self._taken_over(self._bound(captured, known, checks))

    def _finished_entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | None:
        """Returns the worker's result as an entry; ``None`` if it is compared first, or failed, which the report
        says."""
        job, self._job = self._job, None
        assert job is not None, "a worker has finished"
        try:
            executable = job.result()
            self._job = background_compile.compare(
                job, executable, lambda: compile_capture.fetched(job.captured, job.checks, args, kwargs)
            )
            if self._job is not None:
                return None
            entry = self._bound(job.captured, executable, job.checks)
        except background_compile.NotKept:
            self._job = background_compile.start_in_process(job)
            return None
        except BackendError as error:
            self._report.record_break(error.code, error.reason, error.location)
            if not self._in_parts:
                raise
            stop = CaptureFailed(error.code, error.reason, error.location, None)
            self._warn(stop, (stop.code, stop.reason), "was not compiled in the background")
            if job.captured.specialization.has_symbolic_sizes:
                self._specialization, self._exact = (
                    replace(self._specialization, dynamic_sizes=frozenset(), all_dynamic=False),
                    True,
                )
            else:
                self._failed_jobs += 1
            return None
        return self._taken_over(entry)

    def _bound(self, captured: Captured, executable: Executable, checks: dict[str, Any]) -> Entry:
        return compile_capture.bind(captured, executable, checks, self._failed, self._parts, self._is_part)

    def _taken_over(self, entry: Entry) -> Entry:
        self._add(entry)
        self._record(entry, self._job_trigger)
        return entry

    def _meanwhile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        failed = self._failed_jobs >= _MAX_FAILED_JOBS
        code, reason = ("SFX201", "see the line above") if failed else ("SFX206", "the graph is not compiled yet")
        self._report.record_fallback(code, reason)
        return self._fn(*args, **kwargs)

    def _make_part(self, fn: types.FunctionType, name: str) -> CompiledStep:
        """Compiles the rest of the step after a break like a step."""
        part = RestOfStep(fn, self.config, self._parts)
        part._name = name
        part._warned = self._warned
        part._report = self._report.add_part(name)
        return part

    def _record(self, entry: Entry, missed: Missed | None) -> None:
        captured = entry.captured
        if captured.suspension is not None:
            point = captured.suspension.point
            self._report.record_break(point.code, point.reason, point.location)
            stop = CaptureFailed(point.code, point.reason, point.location, None)
            if point.code not in FOLLOWING:
                self._warn(stop, (point.code, str(point.location)), "is captured in parts")
        record_capture(self._report, entry, missed, self._is_part)

    def _update_specialization(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Missed | None:
        """Returns why the newest entry missed, and updates the specialization for values that change."""
        newest = self._newest or next(iter(self._entries), None)
        if newest is None:
            return None
        sizes = self.config.dynamic is not False and not self._exact
        self._specialization, missed = specialized_after(
            newest, self._specialization, args, kwargs, sizes, self._is_part
        )
        return missed

    def _over_limit(self, missed: Missed | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if missed is not None:
            what = f"{missed.label} (was {missed.old}, is {missed.new})"
        elif self._short_lived:
            what = f"{self._short_lived[-1]}, which the program drops after a few calls"
        else:
            what = "the reason the step cannot be captured"
        named = missed.label if missed else ""
        count = len(self._replays) + len(self._short_lived)
        reason = self._limits.setdefault(named, f"{count} captures, and still changing: {what}")
        location = missed.location if missed else None
        if self.config.on_failure == "raise":
            raise RecaptureLimitError("SFX203", reason, location)
        stop = CaptureFailed("SFX203", reason, location, None)
        return self._eager(stop, args, kwargs, key=("SFX203", named))

    def _eager(
        self,
        stop: CaptureFailed,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: tuple[str, str] | None = None,
    ) -> Any:
        """Runs the step eagerly; warns once per reason."""
        strict = self._strict
        if stop.raised:
            return self._eager_after_error(stop, args, kwargs, strict)
        if stop.code not in ("SFX203", "SFX202", "SFX208"):
            self._report.record_break(stop.code, stop.reason, stop.location)
            if strict:
                raise GraphBreakError(stop.code, stop.reason, stop.location) from stop.__cause__
        self._report.record_fallback(stop.code, stop.why_eager, stop.location)
        result = self._fn(*args, **kwargs)  # first: an error of the step itself takes precedence
        self._warn(stop, key or (stop.code, str(stop.location)))
        return result

    def _eager_after_error(
        self, stop: CaptureFailed, args: tuple[Any, ...], kwargs: dict[str, Any], strict: bool
    ) -> Any:
        """Handles an exception from the capture: usually the step's own, which an eager run raises again."""
        try:
            result = self._fn(*args, **kwargs)
        except Exception as error:
            cause = stop.__cause__
            if type(error) is type(cause) and message_of(cause) in (str(error), ""):
                self._report.record_fallback("SFX202", f"the step raised {summary(error)}", stop.location)
            else:
                self._report.record_break(stop.code, stop.reason, stop.location)
                self._report.record_fallback(stop.code, stop.reason, stop.location)
            raise
        self._report.record_break(stop.code, stop.reason, stop.location)
        if strict:
            raise GraphBreakError(stop.code, stop.reason, stop.location) from stop.__cause__
        self._report.record_fallback(stop.code, stop.reason, stop.location)
        self._warn(stop, (stop.code, str(stop.location)))
        return result

    def _warn(self, stop: CaptureFailed, key: tuple[str, str], what: str = "ran eagerly") -> None:
        if key in self._warned:
            return
        self._warned.add(key)
        where = f"{stop.location}: " if stop.location else ""
        text = f"{self._name} {what}: [{stop.code}] {where}{stop.why_eager}"
        warnings.warn(text, SideFXWarning, stacklevel=callers_level())

    def _failed(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the step eagerly after the captured graph raised without changing anything: errors are eager's."""
        if isinstance(error, (VerificationError, UnfinishedError)):
            raise error
        if not self._strict:
            error.__traceback__ = None  # its frames refer to objects that the eager step may drop
        granting = [entry for entry in self._entries if entry.captured.assumptions]
        for entry in [entry for entry in self._entries if entry.fresh]:
            entry.fresh = False
            for _, undo in entry.captured.commits:
                undo()
            if entry.captured.commits:  # it refers to optimizer state that no longer exists
                self._drop(entry)
        if isinstance(error, AssumptionFailed):
            stop = self._disagreement(error, granting)
        else:
            stop = CaptureFailed("SFX202", summary(error), None, None)
        stop.__cause__ = error
        if not self._first_run:
            self._report.calls += 1
            self._hits -= 1  # the caller is about to count a replay
        return self._eager(stop, args, kwargs)

    def _disagreement(self, error: AssumptionFailed, granting: list[Entry]) -> CaptureFailed:
        """Handles a failed assumption; if that is not rare, nothing is assumed any more."""
        lines = dict.fromkeys(line for entry in granting for line in entry.captured.assumptions)
        self._disagreements += 1
        if self._disagreements >= _FEW and self._disagreements * _SELDOM >= self._report.calls + self._hits:
            self._specialization = replace(self._specialization, assumes_nothing=True)
            for entry in granting:
                self._drop(entry)
        if len(lines) == 1:
            return CaptureFailed("SFX208", str(error), next(iter(lines)), None)
        return CaptureFailed("SFX208", f"{error} ({' or '.join(map(str, lines))})", None, None)

    def _differs(self, what: str) -> None:
        """Handles a difference found by ``verify``: the captured graph runs op by op from now on."""
        if self.config.on_failure == "raise":
            raise VerificationError("SFX205", what)
        self._report.record_break("SFX205", what)
        self._warn(CaptureFailed("SFX205", what, None, None), ("SFX205", what), "runs operation by operation")

    def _drop(self, entry: Entry) -> None:
        self._retire(entry)
        if self._newest is entry:
            self._last = None

    def _retire(self, entry: Entry) -> None:
        """Stops replaying an entry; it is still used to explain misses."""
        self._replays = [holder for holder in self._replays if holder.entry is not entry]


@registry.intercept(CompiledStep.__call__)
def _call_in_capture(world: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inlines a compiled step that is called in another one."""
    return world.interp.call(world.interp.getattr(args[0], "_fn"), args[1:], kwargs)


class RestOfStep(CompiledStep):
    """The rest of a step after a break: a function of ``[cells, values]``, which it owns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        noticed = observable_finalization(args[0])
        if noticed is None:
            return super().__call__(*args, **kwargs)
        self._report.calls += 1
        code = self._fn.__code__
        location = Location(code.co_filename, code.co_firstlineno, code.co_name)
        stop = CaptureFailed("SFX115", f"the function alone holds {noticed}", location, None)
        return self._eager(stop, args, kwargs)


def _nothing_more(holder: Holder, label: str) -> None:
    """Does nothing: a stop guard that can no longer hold is only dropped."""


def _seconds_per_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    rounds = []
    for _ in range(15):
        began = time.perf_counter()
        for _ in range(200):
            fn(args, kwargs)
        rounds.append((time.perf_counter() - began) / 200)
    return statistics.median(rounds)
