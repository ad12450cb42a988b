"""Starts the processes: rounds that visit every workload and, inside it, every contender.

The order rotates from round to round, so a slow drift of the machine hits all contenders alike. Every pair has its own
compiler caches in a temporary folder: round 0 is cold, later rounds are warm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Run = dict[str, Any]

REFERENCE = "eager"


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        suite: name of the suite.
        pairs: contenders by workload; the reference is in each.
        rounds: rounds; the first is cold.
        threads: OpenMP threads of each process.
        seconds: steady-state seconds of each process.
        timeout: seconds after which a process counts as failed.
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
    def processes(self) -> int:
        return self.rounds * sum(len(contenders) for contenders in self.pairs.values())


def order(contenders: list[str], round_index: int) -> list[str]:
    """Contenders of one round: rotated; the reference first in round 0, where it writes what others compare with."""
    others = [name for name in contenders if name != REFERENCE]
    shift = round_index % max(1, len(others))
    others = others[shift:] + others[:shift]
    at = round_index % (len(others) + 1)
    return [*others[:at], REFERENCE, *others[at:]]


def measure(plan: Plan, tell: Callable[[Run], None]) -> list[Run]:
    """Runs the plan and returns one dict per process; ``tell`` hears of each as it ends."""
    runs: list[Run] = []
    given_up: set[tuple[str, str]] = set()
    with tempfile.TemporaryDirectory(prefix="sidefx_bench_") as folder:
        for index in range(plan.rounds):
            for workload, contenders in plan.pairs.items():
                for contender in order(contenders, index):
                    if (workload, contender) in given_up or (workload, REFERENCE) in given_up:
                        tell({"workload": workload, "contender": contender, "round": index, "status": "given up"})
                        continue
                    run = _process(plan, workload, contender, index, Path(folder))
                    if run["status"] != "ok":
                        given_up.add((workload, contender))
                    runs.append(run)
                    tell(run)
    return runs


def _process(plan: Plan, workload: str, contender: str, index: int, folder: Path) -> Run:
    label = "".join(c if c.isalnum() else "_" for c in f"{workload}.{contender}")
    cache = folder / "cache" / label
    cache.mkdir(parents=True, exist_ok=True)
    result, log = folder / f"{label}.{index}.json", folder / f"{label}.{index}.log"
    environment = {
        **os.environ,
        **{f"{name}_NUM_THREADS": str(plan.threads) for name in ("OMP", "MKL", "OPENBLAS")},
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "SIDEFX_CACHE_DIR": str(cache),  # native modules and precompiled headers as well, which else are the machine's
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "sidefx_train.bench.worker", "--suite", plan.suite]
    command += ["--workload", workload, "--contender", contender, "--seconds", str(plan.seconds)]
    command += ["--threads", str(plan.threads), "--reference", str(folder / f"{workload}.pt"), "--result", str(result)]
    started = time.perf_counter()
    with log.open("w") as stream:
        try:
            code: Any = subprocess.run(
                command, env=environment, stdout=stream, stderr=stream, timeout=plan.timeout
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"timeout after {plan.timeout:.0f} s"
    run = json.loads(result.read_text()) if result.exists() else {"status": "failed", "note": f"exit: {code}"}
    if run["status"] == "failed" and plan.verbose:
        sys.stderr.write(log.read_text()[-4000:])
    return {
        **run,
        "workload": workload,
        "contender": contender,
        "round": index,
        "process_s": time.perf_counter() - started,
    }
