"""Starts the processes: rounds that visit every workload and, inside it, every contender.

The contenders of a workload alternate every fraction of a second, and their order rotates from round to round, so a
slowdown of the machine affects all of them. Every pair has its own compiler caches in a temporary folder: round 0 is
cold, later rounds are warm.

On the CPU, first steps run one after the other. On CUDA, where compiling takes most of the time, those of several
workloads run at once, as many as fit into the device's memory, and no step is timed before all of them are done.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from sidefx_train.bench.process import SLICE_SECONDS, Process, Run
from sidefx_train.bench.workloads import DEVICE_GIB

REFERENCE = "eager"

LEAST_SLICES = 5

AT_ONCE = 20
"""Processes that run first steps at once, for a machine of 16 cores."""

COMPILE_THREADS = 4
"""Compiling processes of each contender where contenders compile at once."""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        suite: name of the suite.
        pairs: contenders by workload; each list contains the reference.
        rounds: rounds; the first is cold.
        threads: OpenMP threads of each process.
        seconds: steady-state seconds of each process.
        timeout: seconds of first steps, or of an interleaved run, after which a process counts as failed.
        verbose: print the output of failed processes.
        device: ``"cpu"`` or ``"cuda"``.
        device_gib: memory of a device that runs first steps of several processes at once; 0: they run one by one.
        limit: seconds after which no further process is started, and first steps still running have failed.
    """

    suite: str
    pairs: dict[str, list[str]]
    rounds: int = 3
    threads: int = 2
    seconds: float = 1.2
    timeout: float = 600.0
    verbose: bool = False
    device: str = "cpu"
    device_gib: float = 0.0
    limit: float = math.inf

    @property
    def slices(self) -> int:
        """Interleaved runs of each process in a round."""
        return max(LEAST_SLICES, round(self.seconds / SLICE_SECONDS))

    @property
    def processes(self) -> int:
        return self.rounds * sum(len(contenders) for contenders in self.pairs.values())


def order(contenders: list[str], round_index: int) -> list[str]:
    """Returns the contenders of one round: rotated; the reference first in round 0, where it writes reference
    values."""
    others = [name for name in contenders if name != REFERENCE]
    shift = round_index % max(1, len(others))
    others = others[shift:] + others[:shift]
    at = round_index % (len(others) + 1)
    return [*others[:at], REFERENCE, *others[at:]]


def groups(plan: Plan) -> list[list[str]]:
    """Returns the workloads, those together whose processes run first steps at once.

    These are as many as fit into the device's memory, and at most ``AT_ONCE`` processes.
    """
    found: list[list[str]] = []
    free_gib, free_processes = 0.0, 0
    for workload, contenders in plan.pairs.items():
        gib, processes = DEVICE_GIB.get(workload, 1.0) * len(contenders), len(contenders)
        if gib > free_gib or processes > free_processes:
            found.append([])
            free_gib, free_processes = plan.device_gib, AT_ONCE
        found[-1].append(workload)
        free_gib, free_processes = free_gib - gib, free_processes - processes
    return found


def measure(plan: Plan, tell: Callable[[Run], None]) -> list[Run]:
    """Runs the plan and returns one dict per process; calls ``tell`` with each as it ends."""
    runs: list[Run] = []
    given_up: set[tuple[str, str]] = set()
    until = time.perf_counter() + plan.limit
    with tempfile.TemporaryDirectory(prefix="sidefx_bench_") as folder:
        for index in range(plan.rounds):
            for workloads in groups(plan):
                for run in _round(plan, workloads, index, Path(folder), given_up, until):
                    if run["status"] != "given up":
                        runs.append(run)
                    tell(run)
    return runs


def _round(
    plan: Plan, workloads: list[str], index: int, folder: Path, given_up: set[tuple[str, str]], until: float
) -> Iterator[Run]:
    """Yields the runs of workloads as they end; failed ones are skipped in later rounds."""
    begun: dict[tuple[str, str], Process] = {}
    plan = replace(plan, timeout=min(plan.timeout, max(0.0, until - time.perf_counter())))

    def ended(pair: tuple[str, str]) -> Run:
        process = begun.pop(pair)
        run = {**process.end(), "workload": pair[0], "contender": pair[1], "round": index}
        if run["status"] != "ok":
            given_up.add(pair)
        if run["status"] == "failed" and plan.verbose:
            sys.stderr.write(process.log()[-4000:])
        return run

    with ExitStack() as started:
        for workload, contender in [(w, c) for w in workloads for c in order(plan.pairs[w], index)]:
            pair = (workload, contender)
            if pair in given_up or (workload, REFERENCE) in given_up or not plan.timeout:
                yield {"workload": workload, "contender": contender, "round": index, "status": "given up"}
                continue
            begun[pair] = start(plan, workload, contender, index, folder)
            started.callback(begun[pair].close)
            if not plan.device_gib and not begun[pair].becomes_ready():
                yield ended(pair)
        for pair, process in list(begun.items()) if plan.device_gib else ():
            if not process.becomes_ready():
                yield ended(pair)
        for workload in workloads:
            mine = [pair for pair in begun if pair[0] == workload]
            for _ in range(plan.slices):
                for pair in [pair for pair in mine if pair in begun]:
                    if not begun[pair].run_slice():
                        yield ended(pair)
            for pair in [pair for pair in mine if pair in begun]:
                yield ended(pair)


def start(plan: Plan, workload: str, contender: str, index: int, folder: Path) -> Process:
    """Starts the process of a contender in a round."""
    label = "".join(c if c.isalnum() else "_" for c in f"{workload}.{contender}")
    cache = folder / "cache" / label
    cache.mkdir(parents=True, exist_ok=True)
    result, log = folder / f"{label}.{index}.json", folder / f"{label}.{index}.log"
    environment = {
        **os.environ,
        **{f"{name}_NUM_THREADS": str(plan.threads) for name in ("OMP", "MKL", "OPENBLAS")},
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "SIDEFX_CACHE_DIR": str(cache),  # native modules and precompiled headers too, which are shared by default
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if plan.device_gib:  # processes compile at once
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(COMPILE_THREADS))
    command = [sys.executable, "-m", "sidefx_train.bench.worker", "--suite", plan.suite]
    command += ["--workload", workload, "--contender", contender, "--device", plan.device]
    command += ["--threads", str(plan.threads), "--reference", str(folder / f"{workload}.pt"), "--result", str(result)]
    return Process(command, environment, result, log, plan.timeout)
