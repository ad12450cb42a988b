"""Shares work with a fork of this process.

Lowering is Python, which uses one processor. If there is another one, a forked process, which has all of this one's
state, takes pieces of the work from the same list and writes its results to files. A fork that fails or hangs only
costs time: missing results are computed here.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sidefx_train import disk_cache
from sidefx_train import torch_compat as compat
from sidefx_train.disk_cache import scratch_folder

_PATIENCE = 5.0
"""Seconds, beyond the time this process took, that a fork is waited for."""

_forked = False


def may_fork() -> bool:
    """Returns True if a fork would help and is safe: only this thread runs, and no kernels."""
    return (
        sys.platform == "linux"
        and not _forked
        and threading.current_thread() is threading.main_thread()
        and len(os.sched_getaffinity(0)) > 1
        and not torch.cuda.is_initialized()
    )


def begin_fork(folder: str) -> None:
    """Prepares a forked process: no parallel kernel runs in it, since its OpenMP threads did not survive the fork.

    Code generated for the parent still sees the parent's number of threads. The fork prints nothing, ignores Ctrl-C,
    and does not fork again.

    Args:
        folder: for its temporary files; the parent removes it, since the fork may be killed at any time.
    """
    global _forked
    _forked = True
    disk_cache.cache_dir(), disk_cache.machine_dir()  # both may lie in the usual folder
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    faulthandler.disable()
    warnings.simplefilter("ignore")  # nobody sees them; errors they must not be
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.get_num_threads = lambda: threads
    compat.forget_compile_threads()


def start_fork() -> int:
    """Forks; returns 0 in the forked process, which has no threads except those it starts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads exist; the child uses nothing of theirs
        return os.fork()


class Shared:
    """Pieces of work that this process and a fork of it share; each takes the next free one.

    Args:
        count: number of pieces; they are taken in order from 0.
        in_process: runs a piece in this process.
        in_worker: runs a piece in the fork; its result is pickled.
        on_result: called in this process with a result of the fork, during :meth:`poll`.

    Attributes:
        received: pieces that the fork has done.
    """

    def __init__(
        self,
        count: int,
        in_process: Callable[[int], Any],
        in_worker: Callable[[int], Any],
        on_result: Callable[[Any], None],
    ) -> None:
        self._count = count
        self._in_process = in_process
        self._in_worker = in_worker
        self._on_result = on_result
        self._made: dict[int, Any] = {}
        self._awaited: set[int] = set()
        self._folder: Path | None = None
        self.received = 0

    def run(self) -> list[Any]:
        """Returns the result of each piece."""
        with scratch_folder() as self._folder:
            child = start_fork()
            if child == 0:
                self._run_worker_share()
            try:
                self._run_own_share(child)
            finally:
                _end(child)
                self._folder = None
        return [self._made[i] for i in range(self._count)]

    def poll(self) -> None:
        """Reads the results of the fork so far."""
        if self._folder is None:
            return
        for i in sorted(self._awaited):
            path = self._folder / f"made{i}"
            if path.exists():
                self._awaited.discard(i)
                self._made[i] = pickle.loads(path.read_bytes())
                self.received += 1
                self._on_result(self._made[i])

    def _run_own_share(self, child: int) -> None:
        began = time.perf_counter()
        for i in range(self._count):
            if self._take(i):
                self._made[i] = self._in_process(i)
            else:
                self._awaited.add(i)
            self.poll()
        end = time.perf_counter() + max(_PATIENCE, time.perf_counter() - began)
        while self._awaited and not _has_ended(child) and time.perf_counter() < end:
            time.sleep(0.001)
            self.poll()
        self.poll()
        for i in sorted(self._awaited):  # the fork failed: if the piece is the cause, it raises here
            self._made[i] = self._in_process(i)

    def _take(self, i: int) -> bool:
        assert self._folder is not None, "work is shared while it runs"
        try:
            os.close(os.open(self._folder / f"taken{i}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def _run_worker_share(self) -> None:
        try:
            assert self._folder is not None, "work is shared while it runs"
            begin_fork(str(self._folder))
            for i in range(self._count):
                if self._take(i):
                    made = pickle.dumps(self._in_worker(i))
                    whole = self._folder / f"whole{i}"
                    whole.write_bytes(made)
                    whole.rename(self._folder / f"made{i}")
        finally:
            os._exit(0)


def _has_ended(child: int) -> bool:
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # something else has waited for it
        return True


def _end(child: int) -> None:
    """Stops a fork, if it still runs."""
    try:
        if not _has_ended(child):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ChildProcessError, ProcessLookupError):  # something else has waited for it
        pass
