"""One workload with one contender, measured in this process.

What is timed:

* *first step*: from model and data in memory to the first loss in memory. It includes optimizer, lazy imports, capture,
code generation and compilation. Of several processes, it is the first eight steps: data parallelism arranges itself in
  two of them.
* *step*: after eight first steps and a warm-up, in runs of about 0.15 s interleaved with the other contenders
(process.py). Before and after each, the device has run everything.
* *peak memory*: the process's high-water mark, without children; on CUDA, of the device's memory.
* *held memory*: the peak of tensor memory of one step (peak_memory.py, device.py), after everything that is timed.
* *host time*, *launches*: on CUDA (device.py). Launches come last: the figures so far are kept if the profiler fails.
* *communication*: of several processes (ranks.py), of which this one is the first.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sidefx_train.bench.process import GO, READY, SLICE_SECONDS, answers

if TYPE_CHECKING:
    from sidefx_train.bench.ranks import Others
    from sidefx_train.bench.workloads import Tolerance

FIRST_STEPS = 8

Figures = dict[str, Any]


REPORT_CHARACTERS = 4000

PART = 1 << 20
"""Numbers of a vector that are compared at once."""


def measure(
    suite: str,
    name: str,
    contender: str,
    device: str,
    reference: Path,
    talk: TextIO,
    keep: Callable[[Figures], None],
    others: Others,
) -> Figures:
    """Runs and times; compares with the reference values that the first eager run writes to ``reference``.

    ``keep`` is called with the figures so far, before those that may crash the process. ``others`` are the processes
    that run the same steps.
    """
    import torch

    from sidefx_train.bench import contenders, ranks, workloads
    from sidefx_train.bench.device import host_seconds, launch_counts, release_memory

    workload = workloads.build(suite, name, device)
    before = workloads.parameters(workload.model)
    batches = workload.batches
    started = time.perf_counter()
    step = contenders.of(suite)[contender](workload)
    losses, marks = [], []
    for index in range(FIRST_STEPS):
        losses.append(float(step(batches[index % len(batches)])))
        marks.append(time.perf_counter() - started)
    after = workloads.parameters(workload.model)
    if hasattr(step, "wait"):  # for background compilation
        step.wait()
    gc.collect()
    if contender == contenders.REFERENCE and not reference.exists():
        torch.save({"after": after, "changed": _distance(after, before), "losses": losses}, reference)
    del before
    release_memory(device)
    _run_slices(step, batches, device, talk, others)
    result: Figures = {
        "status": "ok",
        "losses": losses,
        "first_s": marks[-1] if others else marks[0],
        "first_steps_s": marks[-1],
        "torch": torch.__version__,
    }
    result.update(_compare(reference, losses, after, workload.tolerance))
    if others:
        _add(result, lambda: ranks.communication(step, batches[0], others))
    else:
        _add(result, lambda: _memory(step, batches[0], device))
    _add(result, lambda: _own_figures(step, batches[0]))
    if device == "cuda":
        _add(result, lambda: {"host_s": host_seconds(step, batches, device)})
        keep(result)
        _add(result, lambda: launch_counts(step, batches, device))
    return result


def follow(suite: str, name: str, contender: str, device: str, rank: int) -> None:
    """Runs the steps that the first process runs: see :func:`measure`."""
    from sidefx_train.bench import contenders, ranks, workloads

    workload = ranks.of_rank(workloads.build(suite, name, device), rank)
    step = contenders.of(suite)[contender](workload)
    for index in range(FIRST_STEPS):
        step(workload.batches[index % len(workload.batches)])
    workloads.parameters(workload.model)  # the first process gathers them
    ranks.follow(step, workload.batches, 0)


def _add(result: Figures, measured: Callable[[], Figures]) -> None:
    """Adds figures to a result; if they cannot be measured, a note that says why."""
    try:
        result.update(measured())
    except Exception as error:
        traceback.print_exc()
        result["note"] = "; ".join(filter(None, (result.get("note"), _text(error))))


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _run_slices(step: Any, batches: list[Any], device: str, talk: TextIO, others: Others) -> None:
    """Runs steps at each start message, and answers with the seconds of one; returns at the end message."""
    from sidefx_train.bench.device import synchronize

    done = 0

    def steps(count: int) -> float:
        nonlocal done
        others.run(count)
        synchronize(device)
        started = time.perf_counter()
        loss = None
        for _ in range(count):
            loss = step(batches[done % len(batches)])
            done += 1
        float(loss)  # type: ignore[arg-type]
        synchronize(device)
        return (time.perf_counter() - started) / count

    print(READY, file=talk)
    count = 0
    for line in sys.stdin:
        if line.strip() != GO:
            return
        steps(1)  # refills the processor's caches after others ran
        if not count:  # not before: other processes may compile at that time
            steps(3)
            count = max(1, round(SLICE_SECONDS / steps(3)))
        print(steps(count), file=talk)


def _compare(reference: Path, losses: list[float], after: Any, tolerance: Tolerance) -> Figures:
    """Returns the largest loss difference, and the parameters' distance from eager's, relative to eager's own.

    They are missing if eager has failed.
    """
    import torch

    allowed = {"loss_tolerance": tolerance.loss, "parameter_tolerance": tolerance.parameters}
    if not reference.exists():
        return allowed
    eager = torch.load(reference, mmap=True)
    off = _distance(after, eager["after"])
    differences = [abs(a - b) for a, b in zip(losses, eager["losses"], strict=True)]
    worst = max(math.inf if math.isnan(d) else d for d in differences)
    return {**allowed, "loss_error": worst, "parameter_error": off / eager["changed"] if eager["changed"] else off}


def _distance(a: Any, b: Any) -> float:
    """Returns the Euclidean distance of two vectors, computed in float64 without copies of that size."""
    import torch

    parts = zip(a.split(PART), b.split(PART), strict=True)
    return math.sqrt(sum(float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2 for x, y in parts))


def _memory(step: Any, batch: Any, device: str) -> Figures:
    from sidefx_train.bench.device import device_memory
    from sidefx_train.bench.peak_memory import held_mb

    if device == "cuda":
        return {"process_mb": peak_memory_mb(), **device_memory(step, batch)}
    return {"memory_mb": peak_memory_mb(), "held_mb": held_mb(step, batch)}


def _own_figures(step: Any, batch: Any) -> Figures:
    """Returns figures that only a captured step has: graphs, breaks, eager steps, dispatch time, its report."""
    figures: Figures = {}
    if hasattr(step, "report"):
        report = step.report()
        figures.update(
            graphs=report.graph_count,
            breaks=len(report.breaks),
            fallbacks=report.fallback_count,
            capture_seconds={k: v for c in report.captures for k, v in c.seconds.items()},
            report=str(report)[:REPORT_CHARACTERS],
        )
    if hasattr(step, "dispatch_seconds"):
        figures["dispatch_s"] = {k: float(v) for k, v in step.dispatch_seconds(batch).items()}
    return figures


def peak_memory_mb() -> float:
    """Returns the high-water mark of this process in MiB."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass  # not Linux: use getrusage
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage / (1024 * 1024 if sys.platform == "darwin" else 1024)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("suite", "workload", "contender", "device"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args(argv)
    import torch

    from sidefx_train.bench import ranks
    from sidefx_train.bench.workloads import Unavailable

    torch.set_num_threads(args.threads)
    together = args.suite == ranks.SUITE
    if args.rank:
        ranks.join(args.rank, args.result.with_suffix(".group"))
        follow(args.suite, args.workload, args.contender, args.device, args.rank)
        return 0
    talk = answers()
    others = ranks.Others(sys.argv[1:] if argv is None else argv) if together else ranks.Others()

    def keep(figures: Figures) -> None:
        args.result.write_text(json.dumps(figures))

    try:
        if together:
            ranks.join(0, args.result.with_suffix(".group"))
        result = measure(args.suite, args.workload, args.contender, args.device, args.reference, talk, keep, others)
    except Unavailable as reason:
        result = {"status": "skipped", "note": str(reason)}
    except Exception as error:
        traceback.print_exc()
        result = {"status": "failed", "note": _text(error)}
    result.setdefault("memory_mb", peak_memory_mb())
    keep(result)
    others.end()
    if args.device == "cuda" or together:  # the end of such a process takes seconds, for which the next one would wait
        sys.stderr.flush()
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
