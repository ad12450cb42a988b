"""Times candidates for the same computation once; caches the times on disk.

A task is a kind of measurement with plain arguments. In a forked worker tasks run on a thread of their own: OpenMP's
threads did not survive the fork, and the worker's main thread, to which they belonged, would wait for them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.native import cpu_description
from sidefx_train.disk_cache import cache_dir

Task = tuple[str, list[Any]]
"""A key of :data:`MEASURES` and its arguments."""

Times = dict[str, float]

MEASURES: dict[str, Callable[..., Times]] = {}
"""Functions that return seconds by candidate, or raise :class:`NotMeasured`."""


class NotMeasured(Exception):
    """Candidates that cannot be timed, or that compute different numbers; the message says why."""


LARGEST = 2e9
"""Floating-point operations of one call above which only a part of the work is timed."""

_VERSION = 5  # version of the candidates
_ROUNDS = 6  # rounds per candidate that may be the fastest
_LARGE, _FEW_ROUNDS = 1e8, 3  # floating-point operations of calls whose times vary little
_CLEARLY = 1.5  # times slower than the fastest: no more rounds after two
_WORTH = 0.03  # seconds on top of the time of all runs at _SLOWEST operations a second: longer only if others are busy
_SLOWEST = 5e7
_MOST_RUNS = 75  # per candidate and part of a round: a call has overhead, however small the product
_PARTS = 4  # timed parts of a round
_ROUND_SECONDS = 0.002  # seconds per candidate and round after which no more parts begin
_PATIENCE = 10.0  # factor of the time limit if nobody waits

_LATE = 0.001  # seconds of one call beyond its operations at this rate: longer only if threads wait
_LEAST_RATE = 4e9

_in_process = False
_waited = False
"""In this compilation, threads of a measurement waited for each other: other processes use the processors."""

_budget, _spent = 2.0, 0.0
"""Limit of autotuning seconds in this compilation, and seconds spent."""


def begin(seconds: float = 2.0) -> None:
    """Begins a compilation, whose measurements share this time limit."""
    global _waited, _budget, _spent
    _waited, _budget, _spent = False, seconds, 0.0


def measure_in_process() -> None:
    """Runs tasks on a thread of their own from now on; for a forked process, where nobody waits."""
    global _in_process
    _in_process = True


def timings(tasks: Mapping[str, Task], share: float = 1.0) -> dict[str, Times]:
    """Returns the seconds of each candidate by key; keys beyond the time limit are missing.

    Args:
        tasks: measurements to make if they are not cached, by key.
        share: fraction of the compilation's time limit after which no more tasks run.
    """
    path = cache_dir() / f"kernels_{cpu_description()}_{torch.__version__}_{_VERSION}.json"
    known = {**_memory.get(path, {}), **_stored(path)}
    unknown = {key: task for key, task in tasks.items() if key not in known}
    if unknown:
        sure, unsure = _on_a_thread(unknown) if _in_process else _now(unknown, share * _budget)
        _write(path, {**_stored(path), **sure})
        _memory.setdefault(path, {}).update(sure | unsure)
        known |= sure | unsure
    return {key: known[key] for key in tasks if key in known}


_memory: dict[Any, dict[str, Times]] = {}
_failed: dict[str, str] = {}
"""Why the last attempt to make a measurement failed, by its key."""


def why_not_measured(key: str) -> str:
    """Returns why there are no times for a key; empty if the time limit was reached."""
    return _failed.get(key, "")


def fastest(times: Times, usual: str) -> str:
    """Returns the fastest candidate; the default one unless another is clearly faster."""
    best = min(times, key=lambda way: times[way], default=usual)
    return best if usual not in times or times[best] < 0.95 * times[usual] else usual


def _stored(path: Any) -> dict[str, Times]:
    try:
        return json.loads(path.read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError):  # none yet, or damaged: missing times are measured
        return {}


def _write(path: Any, known: dict[str, Times]) -> None:
    try:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(known, indent=1))
        temporary.replace(path)
    except OSError:
        return  # a read-only cache folder only costs a measurement per process


def _now(tasks: Mapping[str, Task], budget: float) -> tuple[dict[str, Times], dict[str, Times]]:
    """Returns measured times, and those disturbed by other processes, which are not cached."""
    global _spent
    began = time.perf_counter() - _spent
    sure: dict[str, Times] = {}
    unsure: dict[str, Times] = {}
    for key, (kind, args) in tasks.items():
        if time.perf_counter() - began > budget:
            break
        _failed.pop(key, None)
        try:
            times = MEASURES[kind](*args)
        except NotMeasured as error:  # not cached: it may be possible in another process, or later
            _failed[key] = str(error)
            continue
        (unsure if _waited else sure)[key] = times
    _spent = time.perf_counter() - began
    return sure, unsure


def _on_a_thread(tasks: Mapping[str, Task]) -> tuple[dict[str, Times], dict[str, Times]]:
    """Like :func:`_now`, with OpenMP threads that belong to a new thread of this process, and more time."""
    found: list[tuple[dict[str, Times], dict[str, Times]]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(_now(tasks, _PATIENCE * _budget))
        except BaseException as error:  # raised again below
            failed.append(error)

    thread = threading.Thread(target=run, name="sidefx-measuring")
    thread.start()
    thread.join()
    torch.set_num_threads(1)  # MKL has one number for all threads of a process
    if failed:
        raise failed[0]
    return found[0]


def measured(
    make: Callable[[], dict[str, Callable[[], Any]]], flops: float, threads: int, rounds: int = _ROUNDS
) -> dict[str, float]:
    """Times functions that compute the same, in seconds, on real tensors with ``threads`` threads.

    Each time is the shortest of several runs, in interleaved rounds, so that a busy moment of the machine affects all
    candidates and is not waited for. Candidates far from the fastest after two rounds are dropped. If other processes
    use the processors, threads wait for each other and a call takes as long as their time slices: then, and for the
    rest of the compilation, one thread is timed instead.

    Args:
        make: returns the functions, by name.
        flops: floating-point operations of one call: small ones are repeated.
        threads: number of threads of the step.
        rounds: rounds per function that may be the fastest.
    """
    global _waited
    if _waited:
        threads = 1
    # One thread's own time is not affected by other processes; with several, waiting for each other is part of it.
    clock = time.thread_time if threads == 1 else time.perf_counter
    if flops > _LARGE:
        rounds = min(rounds, _FEW_ROUNDS)
    runs = min(_MOST_RUNS, max(1, int(3e7 / flops / _PARTS)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:  # the random numbers are not the program's
        with compat.outside_tracing(), torch.no_grad(), torch.random.fork_rng(devices=()):
            functions = make()
            best = dict.fromkeys(functions, float("inf"))
            left, end = dict(functions), time.perf_counter() + _WORTH + flops / _SLOWEST
            for round_ in range(rounds):
                for name, function in left.items():
                    function()
                    until = time.perf_counter() + _ROUND_SECONDS
                    for _ in range(_PARTS):
                        start = clock()
                        for _ in range(runs):
                            function()
                        best[name] = min(best[name], (clock() - start) / runs)
                        if time.perf_counter() > until:  # large, or the machine is busy
                            break
                    if threads > 1 and best[name] > _LATE + flops / _LEAST_RATE:
                        _waited = True
                        return measured(make, flops, 1, rounds)
                if round_ >= 1:
                    left = {name: left[name] for name in left if best[name] <= _CLEARLY * min(best.values())}
                if len(left) < 2 or time.perf_counter() > end:
                    break
            return best
    finally:
        torch.set_num_threads(before)
