"""One workload with one contender, measured in this process.

What is timed:

* *first step*: from model and data in memory to the first loss in memory. It includes optimizer, lazy imports, capture,
code generation and compilation.
* *step*: after eight first steps and a warm-up, in runs of about 0.15 s interleaved with the other contenders
(process.py).
* *peak memory*: the process's high-water mark, without children.
* *held memory*: the peak of tensor memory of one step (peak_memory.py), after everything that is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from sidefx_train.bench.process import GO, READY, SLICE_SECONDS, answers

FIRST_STEPS = 8


def measure(suite: str, name: str, contender: str, reference: Path, talk: TextIO) -> dict[str, Any]:
    """Runs and times; compares with the reference values that the first eager run writes to ``reference``."""
    import torch

    from sidefx_train.bench import contenders, workloads
    from sidefx_train.bench.peak_memory import held_mb

    workload = workloads.build(suite, name)
    before = workloads.parameters(workload.model)
    batches = workload.batches
    started = time.perf_counter()
    step = contenders.CONTENDERS[contender](workload)
    losses, marks = [], []
    for index in range(FIRST_STEPS):
        losses.append(float(step(batches[index % len(batches)])))
        marks.append(time.perf_counter() - started)
    after = workloads.parameters(workload.model)
    if hasattr(step, "wait"):  # for background compilation
        step.wait()
    gc.collect()
    if contender == contenders.REFERENCE and not reference.exists():
        torch.save({"before": before, "after": after, "losses": losses}, reference)
    _run_slices(step, batches, talk)
    result: dict[str, Any] = {
        "status": "ok",
        "losses": losses,
        "first_s": marks[0],
        "first_steps_s": marks[-1],
        "torch": torch.__version__,
    }
    result.update(_compare(torch.load(reference), losses, after))
    result.update(_own_figures(step, batches[0]))
    result["memory_mb"] = peak_memory_mb()
    result["held_mb"] = held_mb(step, batches[0])
    return result


def _run_slices(step: Any, batches: list[Any], talk: TextIO) -> None:
    """Runs steps at each start message, and answers with the seconds of one; returns at the end message."""
    done = 0

    def steps(count: int) -> float:
        nonlocal done
        started = time.perf_counter()
        loss = None
        for _ in range(count):
            loss = step(batches[done % len(batches)])
            done += 1
        float(loss)  # type: ignore[arg-type]
        return (time.perf_counter() - started) / count

    steps(3)
    count = max(1, round(SLICE_SECONDS / steps(3)))
    print(READY, file=talk)
    for line in sys.stdin:
        if line.strip() != GO:
            return
        steps(1)  # refills the processor's caches after others ran
        print(steps(count), file=talk)


def _compare(reference: dict[str, Any], losses: list[float], after: Any) -> dict[str, Any]:
    """Returns the largest loss difference, and the parameters' distance from eager's, relative to eager's own."""
    changed = (reference["after"] - reference["before"]).norm().item()
    off = (after - reference["after"]).norm().item()
    differences = [abs(a - b) for a, b in zip(losses, reference["losses"], strict=True)]
    worst = max(math.inf if math.isnan(d) else d for d in differences)
    return {"loss_error": worst, "parameter_error": off / changed if changed else off}


def _own_figures(step: Any, batch: Any) -> dict[str, Any]:
    """Returns figures that only a captured step has: graphs, breaks, eager steps, dispatch time."""
    figures: dict[str, Any] = {}
    if hasattr(step, "report"):
        report = step.report()
        figures.update(
            graphs=report.graph_count,
            breaks=len(report.breaks),
            fallbacks=report.fallback_count,
            capture_seconds={k: v for c in report.captures for k, v in c.seconds.items()},
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
    for name in ("suite", "workload", "contender"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args(argv)
    talk = answers()
    import torch

    from sidefx_train.bench.workloads import Unavailable

    torch.set_num_threads(args.threads)
    try:
        result = measure(args.suite, args.workload, args.contender, args.reference, talk)
    except Unavailable as reason:
        result = {"status": "skipped", "note": str(reason)}
    except Exception as error:
        traceback.print_exc()
        result = {"status": "failed", "note": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    result.setdefault("memory_mb", peak_memory_mb())
    args.result.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
