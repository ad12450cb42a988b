"""The compiled step: the object that the user calls. It replays an entry, or has one captured, or runs eagerly."""

from __future__ import annotations

import copy
import functools
import gc
import time
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.kinds import describe
from sidefx_train.compile.capture.interpreter.exceptions import of_the_program
from sidefx_train.compile.capture.interpreter.generator_finalizers import has_pending_finally
from sidefx_train.compile.capture.resume.driver import Parts
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common import signal_handlers
from sidefx_train.compile.common.type_checks import set_field
from sidefx_train.compile.common.user_code import describable, global_name_of, name_of
from sidefx_train.compile.native import guards_module, native_module, native_ready, products_module
from sidefx_train.compile.pipeline.captured import CaptureFailed
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.pipeline.run_context import Call, RunContext
from sidefx_train.compile.residual.generate import MISS
from sidefx_train.compile.runtime.background_jobs import BackgroundJobs
from sidefx_train.compile.runtime.batch_prefetch import BatchPrefetch
from sidefx_train.compile.runtime.capture_limits import CaptureLimits
from sidefx_train.compile.runtime.capture_report import record_capture
from sidefx_train.compile.runtime.capturer import Capturer
from sidefx_train.compile.runtime.describe import short
from sidefx_train.compile.runtime.entry_cache import EntryCache
from sidefx_train.compile.runtime.entry_holder import Holder
from sidefx_train.compile.runtime.fallback import Fallback
from sidefx_train.compile.runtime.finalizer_check import observable_finalization
from sidefx_train.compile.runtime.graph_failures import GraphFailures, UsualBranches
from sidefx_train.compile.runtime.guard_failures import Missed, SpecializationState
from sidefx_train.compile.runtime.timing.dispatch_timing import dispatch_seconds
from sidefx_train.compile.runtime.timing.eager_comparison import EagerComparison
from sidefx_train.config import CompileConfig
from sidefx_train.errors import FIRST_STEP, FOLLOWING, Location
from sidefx_train.gc_control import fewer_collections
from sidefx_train.report import StepReport

_NOT_COMPILED_YET = CaptureFailed("SFX206", "the graph is not compiled yet", None, None)

_MaybeEntry = TypeVar("_MaybeEntry", bound=Entry | None)


class PartOf(NamedTuple):
    """What the rest of a step after a break shares with the step.

    Attributes:
        name: name of this part.
        parts: all parts of the step.
        report: the part's own report, within the step's.
        warned: keys of the warnings that the step has issued.
        ran_eagerly: called when the part runs eagerly at its limit of captures.
    """

    name: str
    parts: Parts
    report: StepReport
    warned: set[tuple[str, str]]
    ran_eagerly: Callable[[], None] | None = None


class CompiledStep:
    """A function whose whole training step runs as one captured graph.

    Called like the function it wraps. The first call captures and compiles. Later calls replay while everything the
    step read is unchanged, and capture again otherwise. A call that cannot be captured runs the function itself, and
    the report says why.

    Args:
        fn: function, bound method, ``nn.Module``, partial or callable object.
        config: options.
        part_of: the step, if ``fn`` is one of its resume functions.
    """

    def __init__(self, fn: Callable[..., Any], config: CompileConfig, part_of: PartOf | None = None) -> None:
        if not callable(fn):
            raise TypeError(f"sidefx_train.compile needs a callable, got {type(fn).__name__}")
        self.config = config
        self._fn = fn
        self._is_part = part_of is not None
        self._capturing = False
        self._first_run = False
        self._compose(part_of)
        functools.update_wrapper(self, fn if isinstance(fn, types.FunctionType) else describable(fn), updated=())
        self.__wrapped__ = fn

    def _compose(self, part_of: PartOf | None) -> None:
        """Sets the initial state: no entries, nothing known, an empty report."""
        if part_of is None:
            name = name_of(self._fn)
            report = StepReport(name=name, backend=self.config.backend_name)
            part_of = PartOf(name, Parts(self._make_part), report, set())
        self._name, self._parts, self._report, warned, self._part_ran_eagerly = part_of
        self._hits = 0
        self._replays: list[Holder] = []
        config, report = self.config, self._report
        self._specialization = SpecializationState(config, self._is_part, self._parts)
        self._batches = BatchPrefetch(config, report.prefetches, lambda: self._cache.entries)
        # A part that loops over modules created at every call fetches them.
        on_forgotten = self._specialization.refetch if self._is_part else _ignore_label
        self._cache = EntryCache(self._set_replays, self._count_calls, on_forgotten)
        self._fallback = Fallback(self._fn, self._name, config, report, warned)
        self._usual = UsualBranches(
            self._cache,
            self._specialization,
            self._parts.history,
            lambda: self._capturer.deterministic,
            self._is_part,
        )
        failures = GraphFailures(
            config,
            report,
            self._cache,
            self._specialization,
            self._usual,
            self._fallback,
            self._count_calls,
            self._uncount_replay,
        )
        context = RunContext(
            failures.failed,
            failures.differs,
            failures.rest_computes,
            self._ended_in_parts,
            self._parts,
            self._is_part,
        )
        self._capturer = Capturer(self._fn, self._name, config, self._specialization, context)
        self._limits = CaptureLimits(config, self._cache)
        self._jobs = BackgroundJobs(
            config, report, self._capturer, self._specialization, self._limits, self._fallback, context
        )
        self._comparison = EagerComparison(
            config,
            self._record_eager,
            self._cache,
            self._fallback,
            lambda: self._capturer.deterministic,
            self._activity,
            lambda: [entry for part in self._own_parts() for entry in part._cache.entries],
        )

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
            return self._handle_miss(args, kwargs)
        except BaseException as error:
            set_field(error, "__traceback__", of_the_program(error.__traceback__))
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

    def __repr__(self) -> str:
        return f"<CompiledStep {self._name}: {len(self._cache.entries)} entries>"

    def __copy__(self) -> CompiledStep:
        return CompiledStep(self._fn, self.config)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledStep:
        """Copies without captures, like pickling."""
        return CompiledStep(copy.deepcopy(self._fn, memo), self.config)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return global_name_of(self, self._fn) or (CompiledStep, (self._fn, self.config))

    def report(self) -> StepReport:
        """Returns the report: what has been captured, replayed and run eagerly so far."""
        report = self._report
        report.replays += self._hits
        report.calls += self._hits
        self._hits = 0
        for part in self._own_parts():
            part.report()
        return report

    def reset(self) -> None:
        """Drops every captured graph, the specialization, and the report."""
        self._compose(None)

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
        if self._jobs.called or self._cache.entries:
            native_ready()
            products_module()
            native_module()
            guards_module()
        return all(step._jobs.wait(timeout) for step in (self, *self._own_parts()))

    def end(self) -> None:
        """Stops the background compilation of this step; captured entries stay in use."""
        for step in (self, *self._own_parts()):
            step._jobs.end()

    def prefetch(self, *args: Any, **kwargs: Any) -> bool:
        """Begins to copy the next batch to the device while the step runs there.

        Called between two calls of the step, with the arguments of the next. Where a CUDA graph is replayed that reads
        tensors of the host among them, these are copied behind the program's back, at once, from pinned memory. The
        next call takes the copies of those that are still the same tensors, unchanged, and copies the others. A change
        through NumPy or ``Tensor.data`` is not seen. On the CPU, and before the first replay, nothing happens.

        Returns:
            True if a copy was begun.
        """
        return not compat.traced_by_dynamo() and self._batches.prefetch(args, kwargs)

    def dispatch_seconds(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Times the overhead of a replay over the graph, in seconds per call, with this call's arguments.

        Returns:
            ``"guards"``: guards and prologue. ``"dispatch"``: those and the epilogue, with constant outputs of the
            graph; absent for a step whose epilogue changes something, since nothing is run or changed here. Empty if no
            entry fits the arguments.
        """
        return dispatch_seconds(self._cache.entries, Call(args, kwargs))

    # --- no entry fits -------------------------------------------------------------------------------------------

    def _handle_miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call that no entry fits: captures the step again, or runs it eagerly."""
        if self._capturing:  # recursive call
            return self._fn(*args, **kwargs)
        self._report.calls += 1
        tried = bool(self._replays)
        if not tried and self._cache.holders and self._limits.ends_pause():
            self._replays = self._cache.holders
        call = Call(args, kwargs)
        ambient_mode = compat.unsupported_ambient_mode(functions=self.config.warmup == "now")
        if ambient_mode is not None:
            return self._fallback.run(CaptureFailed("SFX111", ambient_mode, None, None), call)
        with compat.function_modes_taken():  # guards read attributes of tensors
            known_stop = self._limits.stop_for(call)
        if known_stop is not None:
            return self._fallback.run(known_stop, call)
        in_background = self.config.warmup == "background" and not self._capturer.deterministic
        if in_background:
            result = self._run_compiled_in_background(call)
            if result is not MISS:
                return result
        given_up = self._limits.backend_stop
        if given_up is not None:
            again = self._fallback.run_silently if in_background else self._fallback.run
            return again(given_up, call)
        known_limit = self._limits.known_limit()
        if known_limit is not None:
            if tried and self._limits.begins_pause(self._report.replays + self._hits):
                self._replays = []
            return self._run_beyond_limit(*known_limit, call)
        newest = self._cache.newest or next(iter(self._cache.entries), None)
        with compat.function_modes_taken():
            stopped = self._limits.latest_stop_guard
            if stopped is not None:
                self._specialization.update_after_stop(stopped, call)
            missed = None if newest is None else self._specialization.update_after(newest, call)
            missed = self._usual.take_trigger() or missed
        stop = self._limits.reached(missed)
        if stop is not None:
            return self._run_beyond_limit(stop, missed.label if missed else "", call)
        return self._capture_in_background(missed, call) if in_background else self._capture_now(missed, call)

    def _run_beyond_limit(self, stop: CaptureFailed, label: str, call: Call) -> Any:
        """Runs a call eagerly that would need another capture: of a value that kept changing."""
        if self._part_ran_eagerly is not None:
            self._part_ran_eagerly()
        return self._fallback.run(stop, call, key=(stop.code, label))

    def _capture_now(self, missed: Missed | None, call: Call) -> Any:
        """Captures, compiles and runs the step."""
        with ExitStack() as quiet:
            quiet.enter_context(fewer_collections())
            entry = self._attempt(self._capturer.capture_and_compile, missed, call)
            if isinstance(entry, CaptureFailed) or entry.captured.suspension is not None:
                quiet.close()  # the program's own code runs
            if isinstance(entry, CaptureFailed):
                return self._fallback.run(entry, call)
            self._limits.backend_failures = 0
            try:
                result = self._run_first(entry, call)
            finally:
                if entry.once:
                    self._cache.retire(entry)
        if result is not MISS:
            return result
        with compat.function_modes_taken():
            found = entry.why(*call)
        what = f"{describe(found[0])}, found {short(found[1])}" if found else "the global state differs"
        self._cache.drop(entry)
        for _, undo in entry.captured.commits if entry.fresh else ():
            undo()
        unstable = CaptureFailed("SFX204", f"a guard does not hold right after the capture: {what}", None, None)
        return self._fallback.run(unstable, call)

    def _capture_in_background(self, missed: Missed | None, call: Call) -> Any:
        """Traces the step, starts a worker that compiles the graph, and runs the step eagerly."""
        entry = self._attempt(functools.partial(self._jobs.begin, missed), missed, call)
        if isinstance(entry, CaptureFailed):
            return self._fallback.run(entry, call)
        result = MISS if entry is None else self._run_first(entry, call)
        return self._fallback.run_silently(_NOT_COMPILED_YET, call) if result is MISS else result

    def _run_compiled_in_background(self, call: Call) -> Any:
        """Replays what a worker has compiled, or runs eagerly; returns :data:`MISS` if the step may be captured now."""
        entry = self._jobs.poll(call)
        if entry is not None:
            self._install(entry, self._jobs.trigger)
            result = self._run_first(entry, call)
            if result is not MISS:
                return result
        if self._jobs.job is not None or not self._jobs.may_begin():
            run = functools.partial(self._fallback.run_silently, _NOT_COMPILED_YET, call)
            samples = self._jobs.samples if self._comparison.applies else None
            return run() if samples is None else samples.run(run, call)
        return MISS

    def _attempt(
        self, capture: Callable[[Call], _MaybeEntry], missed: Missed | None, call: Call
    ) -> _MaybeEntry | CaptureFailed:
        """Captures, and installs the entry or remembers the failure, which is returned: callers handle it outside of
        the handler, since the step's own exceptions must not have ours as context."""
        began = time.perf_counter()
        outcome: _MaybeEntry | CaptureFailed
        self._capturing = True
        try:
            with compat.function_modes_taken():
                outcome = signal_handlers.interruptible(capture, call)
        except CaptureFailed as stop:
            outcome = stop
        finally:
            self._capturing = False
        self._release_references(outcome, call)
        if isinstance(outcome, CaptureFailed):
            if outcome.code != FIRST_STEP:
                self._limits.add_stop(outcome)
            if outcome.of_backend:
                self._limits.add_backend_failure(outcome)
            return outcome
        if missed is not None:
            self._report.record_recapture(*missed, time.perf_counter() - began)
        self._limits.end_equal_stops()
        if outcome is not None:
            self._install(outcome, missed)
        return outcome

    def _release_references(self, outcome: Entry | CaptureFailed | None, call: Call) -> None:
        """Releases references of a finished capture: the step's objects must be finalized where eager drops them."""
        if isinstance(outcome, CaptureFailed) and not self.config.strict:
            for error in (outcome, outcome.__cause__):
                if error is not None:
                    set_field(error, "__traceback__", None)
        waits = self._is_part and any(has_pending_finally(value) for part in call.args[0] for value in part)
        if waits or (isinstance(outcome, CaptureFailed) and outcome.code == "SFX115"):
            gc.collect()

    def _install(self, entry: Entry, missed: Missed | None) -> None:
        """Adds an entry to those that calls try, and reports its capture."""
        record = record_capture(self._report, entry, missed, self._is_part)
        early = self._jobs.take_samples()
        if not self._is_part:  # the step is timed as a whole
            self._comparison.begin(entry, record, early)
        self._cache.add(entry)
        suspension = entry.captured.suspension
        if suspension is not None and not suspension.point.native:
            point = suspension.point
            self._report.record_break(point.code, point.reason, point.location)
            if point.code not in FOLLOWING:
                stop = CaptureFailed(point.code, point.reason, point.location, None)
                self._fallback.warn(stop, ("break", str(point.location)), "is captured in parts")  # once for each line

    def _run_first(self, entry: Entry, call: Call) -> Any:
        """Runs an entry for the first time; returns :data:`MISS` if its guards do not hold."""
        self._first_run = True
        try:
            result = entry.replay(*call)
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

    # --- for the collaborators -----------------------------------------------------------------------------------

    def _set_replays(self, holders: list[Holder]) -> None:
        self._replays = holders
        self._batches.entries_changed()

    def _count_calls(self) -> int:
        """Returns the number of calls so far, including replays that the report does not contain yet."""
        return self._report.calls + self._hits

    def _uncount_replay(self) -> None:
        """Counts an eager call in place of the replay that :meth:`__call__` is about to count."""
        if not self._first_run:
            self._record_eager()

    def _record_eager(self) -> None:
        self._report.calls += 1
        self._hits -= 1

    def _activity(self) -> tuple[int, ...]:
        """Returns numbers, one of which changes when a call does more than replay: when it captures (successfully or
        not) or compares results, or when it or a part runs eagerly until a worker has compiled."""
        parts = self._own_parts()
        steps = (self, *parts)
        captures = [capture for step in steps for capture in step._report.captures]
        waited = [found.count for part in parts for found in part._report.fallbacks if found.code == "SFX206"]
        return (
            self._report.fallback_count,
            len(captures),
            sum(len(step._limits.stops) for step in steps),
            sum(len(capture.verification) for capture in captures),
            sum(waited),
        )

    def _own_parts(self) -> list[Any]:
        """Returns the steps that this step has been split into."""
        return [] if self._is_part else self._parts.steps()

    def _ended_in_parts(self) -> None:
        """Looks for branches that have gone one way for a while, after a call in parts."""
        if self._parts.history.end_call():
            for step in (self, *self._own_parts()):
                step._usual.settle()

    def _make_part(self, fn: types.FunctionType, name: str) -> CompiledStep:
        """Compiles the rest of the step after a break like a step."""
        report, ran_eagerly = self._report.add_part(name), self._comparison.part_ran_eagerly
        return RestOfStep(fn, self.config, PartOf(name, self._parts, report, self._fallback.warned, ran_eagerly))


@registry.intercept(CompiledStep.__call__)
def _call_in_capture(world: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inlines a compiled step that is called in another one."""
    return world.interp.call(world.interp.getattr(args[0], "_fn"), args[1:], kwargs)


class RestOfStep(CompiledStep):
    """The rest of a step after a break: a function of ``[cells, values]``, which it owns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = observable_finalization(args[0])
        if held is None:
            return super().__call__(*args, **kwargs)
        self._report.calls += 1
        code = self._fn.__code__
        location = Location(code.co_filename, code.co_firstlineno, code.co_name)
        stop = CaptureFailed("SFX115", f"the function alone holds {held}", location, None)
        return self._fallback.run(stop, Call(args, kwargs))


def _ignore_label(label: str) -> None:
    """Does nothing: a whole step is captured again for other objects."""
