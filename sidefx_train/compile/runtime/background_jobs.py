"""The background compilation of one step: traced between two of its calls, compiled by a worker during later ones."""

from __future__ import annotations

import functools

from sidefx_train.compile.graph.collectives import communicates
from sidefx_train.compile.native import native_ready
from sidefx_train.compile.pipeline import compile_capture, next_specialization
from sidefx_train.compile.pipeline.captured import CaptureFailed
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.pipeline.run_context import Call, RunContext
from sidefx_train.compile.runtime import background_compile
from sidefx_train.compile.runtime.background_compile import Job
from sidefx_train.compile.runtime.capture_limits import CaptureLimits
from sidefx_train.compile.runtime.capturer import Capturer
from sidefx_train.compile.runtime.fallback import Fallback
from sidefx_train.compile.runtime.guard_failures import Missed, SpecializationState
from sidefx_train.compile.runtime.timing.eager_comparison import EarlySamples
from sidefx_train.config import CompileConfig
from sidefx_train.errors import BackendError
from sidefx_train.report import StepReport

_MAX_EARLY_CAPTURES = 3
"""Limit of background captures before the step has created its state; then the capture creates it."""


class BackgroundJobs:
    """The jobs of one step, one at a time.

    Args:
        config: options.
        report: report of the step.
        capturer: captures the step.
        specialization: specialization state of the step.
        limits: counts failing workers.
        fallback: warns of them.
        context: what entries refer to when they run.

    Attributes:
        job: the job that is running, or has finished and not been polled yet.
        trigger: why the latest job's capture was necessary.
        called: the step has run once.
        samples: times of the eager steps since the latest job began; ``None`` without a job.
    """

    def __init__(
        self,
        config: CompileConfig,
        report: StepReport,
        capturer: Capturer,
        specialization: SpecializationState,
        limits: CaptureLimits,
        fallback: Fallback,
        context: RunContext,
    ) -> None:
        self._config, self._report = config, report
        self._capturer, self._specialization = capturer, specialization
        self._limits, self._fallback, self._context = limits, fallback, context
        self._early_captures = 0
        self.job: Job | None = None
        self.trigger: Missed | None = None
        self.called = False
        self.samples: EarlySamples | None = None

    def may_begin(self) -> bool:
        """Returns True if a call of the step may begin a job: not the first, which creates state (gradients, optimizer
        state, buffers), and none before the native modules are built."""
        first, self.called = not self.called, True
        return native_ready() and not first

    def begin(self, missed: Missed | None, call: Call) -> Entry | None:
        """Traces a call and starts a worker.

        Args:
            missed: why the capture is necessary.
            call: the call, which is about to run eagerly.

        Returns:
            An entry if none is needed: the compiled graph is in the cache, or is compiled at once.

        Raises:
            CaptureFailed: the step cannot be captured.
        """
        captured = self._capturer.trace(call)
        if captured.commits and self._early_captures < _MAX_EARLY_CAPTURES:
            self._early_captures += 1
            return None  # the step is about to create that state itself
        self._specialization.current = captured.specialization
        if self._capturer.serves_one_call(captured):
            return None
        self.trigger = missed
        with self._capturer.failing_as_capture(captured.specialization):
            # No step creates state, for example a skipped update; or other processes take part: all change over to
            # captured steps at the same call, since eager's updates are rounded differently.
            if captured.commits or communicates(captured.traced.module.graph):
                return self._capturer.compile(captured, call)
            checks = compile_capture.guard_checks(captured, call)
            request = background_compile.Request(captured, checks, self._config, self._context.differs)
            known = background_compile.load_compiled(request)
            if known is None:
                inputs = functools.partial(compile_capture.fetched, captured, checks, call)
                self.job = background_compile.start(request, inputs)
                self.samples = EarlySamples(captured, checks)
                return None
        return compile_capture.bind(captured, known, checks, self._context)

    def take_samples(self) -> list[float]:
        """Returns the seconds of the eager steps that ran while the latest job compiled, and forgets them."""
        samples, self.samples = self.samples, None
        return [] if samples is None else samples.seconds

    def poll(self, call: Call) -> Entry | None:
        """Returns the entry that a worker has compiled; ``None`` if it is still busy, or failed, which the report
        says."""
        if self.job is None or not self.job.done():
            return None
        job, self.job = self.job, None
        captured, checks = job.request.captured, job.request.checks
        try:
            executable = job.result()
            inputs = functools.partial(compile_capture.fetched, captured, checks, call)
            self.job = background_compile.compare(job, executable, inputs)
            return None if self.job is not None else compile_capture.bind(captured, executable, checks, self._context)
        except background_compile.NotCacheable:
            self.job = background_compile.start_in_process(job)
        except BackendError as error:
            self._failed(job, error)
        return None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until no worker is busy; returns False if one still is after ``timeout`` seconds."""
        return self.job is None or self.job.wait(timeout)

    def end(self) -> None:
        """Stops the worker, whose result is no longer needed."""
        job, self.job, self.samples = self.job, None, None
        if job is not None:
            job.end()

    def _failed(self, job: Job, error: BackendError) -> None:
        """Reports that a worker failed; the next capture has another specialization or static sizes, or counts as one
        that fails again."""
        self.samples = None
        self._report.record_break(error.code, error.reason, error.location)
        if self._config.strict:
            raise error
        stop = CaptureFailed(error.code, error.reason, error.location, None)
        self._fallback.warn(stop, (stop.code, stop.reason), "was not compiled in the background")
        captured = job.request.captured
        spec = captured.specialization
        other = next_specialization.after_refusal(spec, captured.traced)
        if other is not None:
            self._specialization.current = other
        elif spec.has_symbolic_sizes:
            self._specialization.current = self._specialization.with_static_sizes()
            self._specialization.keep_sizes_static()
        else:
            self._limits.add_backend_failure(stop)
