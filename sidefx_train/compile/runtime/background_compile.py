"""Background compilation of a captured graph during training.

If the result can be cached on disk, a forked process compiles it there and this one loads it: Inductor is Python, and a
thread would compete with the training at every operation. Everything else (other backends, graphs that cannot be
cached, a process that uses CUDA) is compiled by a thread. Neither keeps the process from exiting, and Ctrl-C reaches
neither.

A forked process has a copy of the step's inputs from the time of the fork. It also compares the compiled graph with the
captured graph, so that training does not wait for that either: the process that compiled does it, or another one for a
graph compiled by a thread. The verdict comes back with the result. The first run is compared instead for a graph loaded
from the cache, for one that somebody waited for, and for a separate backward, whose inputs exist only when it runs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sidefx_train.compile.backend.compile_graph import build, can_be_handed_over, hand_over, key_of, take
from sidefx_train.compile.backend.cpp_codegen.forked_lowering import begin_fork, start_fork
from sidefx_train.compile.backend.verification.first_runs import Proving, Verdict
from sidefx_train.compile.graph.artifacts import Executable, TracedGraph
from sidefx_train.compile.native import start_build
from sidefx_train.compile.pipeline import compile_capture
from sidefx_train.compile.pipeline.captured import Captured
from sidefx_train.config import CompileConfig
from sidefx_train.errors import BackendError

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)

_MAX_COMPARISON_SECONDS = 600
"""Seconds after which a comparison is abandoned."""

Differs = Callable[[str], None]
"""Called with a description of the difference if a compiled graph is wrong."""

Inputs = Callable[[], list[Any] | None]
"""Fetches a graph's inputs for a call of the step; returns ``None`` if its guards do not hold."""


class NotCacheable(Exception):
    """A process compiled a graph that it cannot pass on: a thread must compile it."""


@dataclass(frozen=True)
class Request:
    """What to compile.

    Attributes:
        captured: the capture.
        checks: checks of its guards, built when it was captured.
        config: options.
        differs: called with the result of a failed comparison.
    """

    captured: Captured
    checks: dict[str, Any]
    config: CompileConfig
    differs: Differs

    @property
    def graphs(self) -> list[TracedGraph]:
        """The graphs of the capture."""
        return [self.captured.traced] if self.captured.joint is None else list(self.captured.joint.graphs)

    def compile(
        self, compiler: Callable[[TracedGraph, CompileConfig], Executable], verdict: Verdict | None = None
    ) -> Executable:
        """Compiles the graphs; see :func:`compile_capture.compile_graphs`."""
        return compile_capture.compile_graphs(self.captured, self.config, compiler, self.differs, verdict)


class Job:
    """One graph being compiled.

    Attributes:
        request: what is compiled.
        awaited: somebody waits for the captured step: it is used as soon as it is compiled.
    """

    awaited = False

    def __init__(self, request: Request) -> None:
        self.request = request
        self._began = time.perf_counter()

    def done(self) -> bool:
        """Returns True if :meth:`result` would not wait."""
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> bool:
        """Waits at most ``timeout`` seconds; returns :meth:`done`."""
        raise NotImplementedError

    def result(self) -> Executable:
        """Returns the compiled graph.

        Raises:
            BackendError: compilation failed.
            NotCacheable: it was compiled, but must be compiled again in this process.
        """
        raise NotImplementedError

    def end(self) -> None:
        """Stops the work, whose result is no longer needed; returns when all of it has ended."""
        raise NotImplementedError


def start(request: Request, inputs: Inputs = lambda: None) -> Job:
    """Starts compiling a captured graph; called between two steps.

    Args:
        request: what to compile.
        inputs: fetches the inputs of the call that is about to run.
    """
    start_build()
    if _can_fork() and all(can_be_handed_over(graph, request.config) for graph in request.graphs):
        return _Process(request, inputs)
    return _Thread(request)


def compare(job: Job, executable: Executable, inputs: Inputs) -> Job | None:
    """Starts comparing a thread's result in a forked process; returns ``None`` if its first run must be compared.

    Args:
        job: the thread's work, which is finished.
        executable: its result.
        inputs: fetches the inputs of the call that is about to run.
    """
    proving = executable.run
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    if not isinstance(job, _Thread) or job.awaited or not isinstance(proving, Proving) or cuda or not _can_fork():
        return None
    if proving.calls_python:
        return None
    return _Comparison(job, executable, proving, inputs)


def _can_fork() -> bool:
    return hasattr(os, "fork") and sys.platform == "linux"


def start_in_process(job: Job) -> Job:
    """Starts again in this process what another one could not pass on."""
    return _Thread(job.request)


def load_compiled(request: Request, verdict: Verdict | None = None) -> Executable | None:
    """Returns the captured graph as compiled by an earlier process or worker, if it is in the cache.

    Args:
        request: what would be compiled.
        verdict: result of the worker's comparison.
    """
    missing = False

    def from_cache(traced: TracedGraph, config: CompileConfig) -> Executable:
        nonlocal missing
        found = take(traced, config)
        missing = missing or found is None
        return found if found is not None else Executable(_not_compiled, atomic=True)

    executable = request.compile(from_cache, verdict)
    return None if missing else executable


def _not_compiled(args: list[Any]) -> list[Any]:
    raise RuntimeError("a graph that was not compiled is never run")


class _Thread(Job):
    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._executable: Executable | None = None
        self._error: Exception | None = None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sidefx-warmup", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._executable = self.request.compile(build)
        except Exception as error:  # raised again by result()
            self._error = error
        finally:
            self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        self.awaited = True
        return self._finished.wait(timeout)

    def end(self) -> None:
        self._thread.join()  # a thread cannot be stopped

    def result(self) -> Executable:
        self._finished.wait()
        if self._executable is None:
            if isinstance(self._error, BackendError):
                raise self._error
            raise BackendError("SFX201", f"{type(self._error).__name__}: {self._error}") from self._error
        return self._executable


class _Forked(Job):
    """Work of a forked process, which writes its messages as a line of JSON to a file."""

    def __init__(self, request: Request, work: Callable[[str], None]) -> None:
        super().__init__(request)
        folder = tempfile.mkdtemp(prefix="sidefx_")
        name = os.path.join(folder, "message.json")
        self._message_file = Path(name)
        self._status: int | None = None
        self._child = start_fork()
        if self._child == 0:
            work(name)
        self._end = weakref.finalize(self, _end, self._child, folder)  # at exit as well

    def done(self) -> bool:
        if self._status is None:
            try:
                child, status = os.waitpid(self._child, os.WNOHANG)
            except ChildProcessError:  # another part of the program has waited for it
                child, status = self._child, 0
            if child:
                self._status = status
        return self._status is not None

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.perf_counter() + timeout
        while not self.done() and (end is None or time.perf_counter() < end):
            time.sleep(0.005)
        return self.done()

    def end(self) -> None:
        self._end()

    def _read_message(self) -> dict[str, Any]:
        """Returns the message of the process, which has ended."""
        self.wait()
        text = self._message_file.read_text() if self._message_file.exists() else ""
        self._end()
        return json.loads(text) if text else {}

    def _verdict(self, message: dict[str, Any]) -> Verdict | None:
        """Returns the verdict of the comparison; ``None`` if the first run must be compared."""
        if "verdict" in message:
            return replace(Verdict(**message["verdict"]), in_background=True)
        killed = os.WTERMSIG(self._status or 0)
        if message.get("comparing") and killed in _CRASHES:
            name = signal.Signals(killed).name
            return Verdict(
                differs=f"the compiled graph ended the process that compared it ({name})", in_background=True
            )
        return None


class _Process(_Forked):
    """Compiles into the cache, and compares."""

    def __init__(self, request: Request, inputs: Inputs) -> None:
        super().__init__(request, lambda message_file: _work(request.graphs, request.config, message_file, inputs))

    def result(self) -> Executable:
        message = self._read_message()
        if message.get("not cacheable"):
            raise NotCacheable
        failed = message.get("failed", "")
        executable = None
        if not failed:
            executable = load_compiled(self.request, self._verdict(message))
        if executable is None:
            raise BackendError("SFX201", failed or f"the worker ended with status {self._status} without a result")
        executable.seconds["in the background"] = time.perf_counter() - self._began
        return executable


class _Comparison(_Forked):
    """Compares an already compiled graph."""

    def __init__(self, job: Job, executable: Executable, proving: Proving, inputs: Inputs) -> None:
        self._executable, self._proving = executable, proving
        super().__init__(job.request, lambda message_file: _compare(proving, message_file, inputs))

    def result(self) -> Executable:
        verdict = self._verdict(self._read_message())
        if verdict is None or not self._proving.hear(verdict):
            return self._executable
        return replace(self._executable, run=self._proving.compiled)


def _end(child: int, folder: str) -> None:
    """Stops a worker, and the compilers it started, if it is still running, and removes its files."""
    try:
        ended = os.waitpid(child, os.WNOHANG)[0] != 0
    except ChildProcessError:
        ended = True
    if not ended:
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:  # it has no process group yet
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)


def _work(graphs: list[TracedGraph], config: CompileConfig, message_file: str, inputs: Inputs = lambda: None) -> None:
    """Runs in the forked process: compiles into the cache, reports errors, and exits without any clean-up."""
    try:
        os.setsid()  # its compilers end with it, and Ctrl-C is for the training
        values = _fetched(inputs) if config is not None and config.verify != 0 else None
        begin_fork(os.path.dirname(message_file))
        key = key_of(graphs[0], config) if values is not None else None
        if not all(hand_over(graph, config) for graph in graphs):
            _write_message(message_file, {"not cacheable": True})
        elif values is not None:
            proving = compile_capture.proving(graphs[0], config, lambda traced, config: take(traced, config, key))
            if proving is not None and not proving.calls_python:
                _compare_and_report(proving, values, message_file)
    except BaseException as error:
        reason = error.reason if isinstance(error, BackendError) else "".join(traceback.format_exception_only(error))
        _write_message(message_file, {"failed": reason.strip() or "unknown"})
    finally:
        os._exit(0)


def _compare(proving: Proving, message_file: str, inputs: Inputs) -> None:
    """Runs in a forked process that only compares."""
    try:
        os.setsid()
        values = _fetched(inputs)
        begin_fork(os.path.dirname(message_file))
        if values is not None:
            _compare_and_report(proving, values, message_file)
    finally:
        os._exit(0)


def _fetched(inputs: Inputs) -> list[Any] | None:
    try:
        return inputs()
    except Exception:  # the program's own code raised: comparing the first run makes it visible
        return None


def _compare_and_report(proving: Proving, values: list[Any], message_file: str) -> None:
    """Compares and reports the verdict; if that fails, the first run is compared."""
    _write_message(message_file, {"comparing": True})
    signal.alarm(_MAX_COMPARISON_SECONDS)
    verdict: list[Verdict] = []

    def compare() -> None:
        torch.set_num_threads(torch.get_num_threads())  # new OpenMP threads for this thread: the parent's are gone
        verdict.append(proving.compare(values))

    thread = threading.Thread(target=compare, name="sidefx-comparing")
    thread.start()
    thread.join()
    if verdict and not verdict[0].unproven:
        _write_message(message_file, {"verdict": asdict(verdict[0])})


def _write_message(message_file: str, message: dict[str, Any]) -> None:
    Path(message_file).write_text(json.dumps(message))
