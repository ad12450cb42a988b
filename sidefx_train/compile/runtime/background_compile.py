"""Compiles a captured graph beside the training.

Where the result can be kept on disk, a forked process compiles it there and this one loads it: Inductor is Python, and
a thread would take turns with the training at every operation. Everything else (other backends, graphs that cannot be
kept, a process that uses CUDA) is compiled by a thread. Neither keeps the process from ending, and Ctrl-C reaches
neither.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sidefx_train.compile.backend.compile_graph import build, can_be_handed_over, hand_over, take
from sidefx_train.compile.backend.cpp_codegen.forked_lowering import begin_fork, start_fork
from sidefx_train.compile.graph.artifacts import Executable, TracedGraph
from sidefx_train.compile.native import start_build
from sidefx_train.compile.pipeline import compile_capture as pipeline
from sidefx_train.compile.pipeline.captured import Captured
from sidefx_train.config import CompileConfig
from sidefx_train.errors import BackendError

_NOT_KEPT = "not kept"

Differs = Callable[[str], None]
"""Told in words what differs, where a compiled graph is found wrong."""


class NotKept(Exception):
    """A process compiled what cannot be handed over: it is a thread's work."""


class Job:
    """One graph being compiled.

    Attributes:
        captured: the capture.
        checks: its guards' tests, made when it was captured.
    """

    def __init__(self, captured: Captured, checks: dict[str, Any], config: CompileConfig, differs: Differs) -> None:
        self.captured = captured
        self.checks = checks
        self._config = config
        self._differs = differs
        self._began = time.perf_counter()

    def done(self) -> bool:
        """True if :meth:`result` does not wait."""
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> bool:
        """Waits, at most ``timeout`` seconds; returns :meth:`done`."""
        raise NotImplementedError

    def result(self) -> Executable:
        """The compiled graph.

        Raises:
            BackendError: it could not be compiled.
            NotKept: it was compiled, but has to be compiled in this process.
        """
        raise NotImplementedError

    def end(self) -> None:
        """Ends the work, whose result nobody wants any more; returns when nothing of it runs."""
        raise NotImplementedError


def start(captured: Captured, checks: dict[str, Any], config: CompileConfig, differs: Differs) -> Job:
    """Begins to compile a captured graph; called between two steps. ``differs`` is told what a comparison finds."""
    start_build()
    graphs = [captured.traced] if captured.joint is None else list(captured.joint.graphs)
    if hasattr(os, "fork") and sys.platform == "linux" and all(can_be_handed_over(graph, config) for graph in graphs):
        return _Process(captured, checks, config, differs, graphs)
    return _Thread(captured, checks, config, differs)


def start_here(job: Job) -> Job:
    """Begins once more, in this process, what another one could not hand over."""
    return _Thread(job.captured, job.checks, job._config, job._differs)


def taken(captured: Captured, config: CompileConfig, differs: Differs) -> Executable | None:
    """The captured graph as an earlier process or worker compiled it, if it is in the cache."""
    missing = False

    def from_cache(traced: TracedGraph, config: CompileConfig) -> Executable:
        nonlocal missing
        found = take(traced, config)
        missing = missing or found is None
        return found if found is not None else Executable(_nothing, atomic=True)

    executable = pipeline.compile_graphs(captured, config, from_cache, differs)
    return None if missing else executable


def _nothing(args: list[Any]) -> list[Any]:
    raise RuntimeError("a graph that was not compiled is never run")


class _Thread(Job):
    def __init__(self, captured: Captured, checks: dict[str, Any], config: CompileConfig, differs: Differs) -> None:
        super().__init__(captured, checks, config, differs)
        self._executable: Executable | None = None
        self._error: Exception | None = None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sidefx-warmup", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._executable = pipeline.compile_graphs(self.captured, self._config, build, self._differs)
        except Exception as error:  # raised again by result()
            self._error = error
        finally:
            self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._finished.wait(timeout)

    def end(self) -> None:
        self._thread.join()  # a thread cannot be stopped

    def result(self) -> Executable:
        self.wait()
        if self._executable is None:
            if isinstance(self._error, BackendError):
                raise self._error
            raise BackendError("SFX201", f"{type(self._error).__name__}: {self._error}") from self._error
        return self._executable


class _Process(Job):
    def __init__(
        self,
        captured: Captured,
        checks: dict[str, Any],
        config: CompileConfig,
        differs: Differs,
        graphs: list[TracedGraph],
    ) -> None:
        super().__init__(captured, checks, config, differs)
        handle, name = tempfile.mkstemp(prefix="sidefx_", suffix=".txt")
        os.close(handle)
        self._said = Path(name)
        self._status: int | None = None
        self._child = start_fork()
        if self._child == 0:
            _work(graphs, config, name)
        self._end = weakref.finalize(self, _end, self._child, name)  # at exit as well

    def done(self) -> bool:
        if self._status is None:
            try:
                child, status = os.waitpid(self._child, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
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

    def result(self) -> Executable:
        self.wait()
        said = self._said.read_text() if self._said.exists() else ""
        self._end()
        if said == _NOT_KEPT:
            raise NotKept
        executable = taken(self.captured, self._config, self._differs) if not said else None
        if executable is None:
            raise BackendError("SFX201", said or f"the worker ended with status {self._status} and left nothing")
        executable.seconds["beside training"] = time.perf_counter() - self._began
        return executable


def _end(child: int, said: str) -> None:
    """Ends a worker, and the compilers it started, if it still runs."""
    try:
        ended = os.waitpid(child, os.WNOHANG)[0] != 0
    except ChildProcessError:
        ended = True
    if not ended:
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own yet
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    Path(said).unlink(missing_ok=True)


def _work(graphs: list[TracedGraph], config: CompileConfig, said: str) -> None:
    """The forked process: compiles into the cache, says what went wrong, and leaves without any clean-up."""
    try:
        os.setsid()  # its compilers end with it, and Ctrl-C is for the training
        begin_fork()
        if not all(hand_over(graph, config) for graph in graphs):
            Path(said).write_text(_NOT_KEPT)
    except BaseException as error:
        reason = error.reason if isinstance(error, BackendError) else "".join(traceback.format_exception_only(error))
        Path(said).write_text(reason.strip() or "unknown")
    finally:
        os._exit(0)
