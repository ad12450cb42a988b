"""Starts the processes: rounds that visit every workload and, inside it, every contender.

The contenders of a workload alternate every fraction of a second, and their order rotates from round to round, so a
slowdown of the machine affects all of them. Every pair has its own compiler caches in a temporary folder: round 0 is
cold, later rounds are warm.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sidefx_train.bench.process import SLICE_SECONDS, Process, Run

REFERENCE = "eager"

LEAST_SLICES = 5


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
    """

    suite: str
    pairs: dict[str, list[str]]
    rounds: int = 3
    threads: int = 2
    seconds: float = 1.2
    timeout: float = 600.0
    verbose: bool = False

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


def measure(plan: Plan, tell: Callable[[Run], None]) -> list[Run]:
    """Runs the plan and returns one dict per process; calls ``tell`` with each as it ends."""
    runs: list[Run] = []
    given_up: set[tuple[str, str]] = set()
    with tempfile.TemporaryDirectory(prefix="sidefx_bench_") as folder:
        for index in range(plan.rounds):
            for workload in plan.pairs:
                for run in _round(plan, workload, index, Path(folder), given_up):
                    if run["status"] != "given up":
                        runs.append(run)
                    tell(run)
    return runs


def _round(plan: Plan, workload: str, index: int, folder: Path, given_up: set[tuple[str, str]]) -> Iterator[Run]:
    """Yields the runs of a workload as they end; failed ones are skipped in later rounds."""
    ready: dict[str, Process] = {}

    def ended(contender: str, process: Process) -> Run:
        run = {**process.end(), "workload": workload, "contender": contender, "round": index}
        if run["status"] != "ok":
            given_up.add((workload, contender))
        if run["status"] == "failed" and plan.verbose:
            sys.stderr.write(process.log()[-4000:])
        return run

    with ExitStack() as begun:
        for contender in order(plan.pairs[workload], index):
            if (workload, contender) in given_up or (workload, REFERENCE) in given_up:
                yield {"workload": workload, "contender": contender, "round": index, "status": "given up"}
                continue
            process = start(plan, workload, contender, index, folder)
            begun.callback(process.close)
            if process.becomes_ready():
                ready[contender] = process
            else:
                yield ended(contender, process)
        for _ in range(plan.slices):
            for contender, process in list(ready.items()):
                if not process.run_slice():
                    yield ended(contender, ready.pop(contender))
        for contender, process in ready.items():
            yield ended(contender, process)


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
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "sidefx_train.bench.worker", "--suite", plan.suite]
    command += ["--workload", workload, "--contender", contender]
    command += ["--threads", str(plan.threads), "--reference", str(folder / f"{workload}.pt"), "--result", str(result)]
    return Process(command, environment, result, log, plan.timeout)
