"""Times what a replay costs besides its graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.pipeline.run_context import Call
from sidefx_train.compile.residual.generate import MISS

_ROUNDS, _CALLS_PER_ROUND = 15, 200


def dispatch_seconds(entries: list[Entry], call: Call) -> dict[str, float]:
    """Times the first entry that fits a call; see :meth:`CompiledStep.dispatch_seconds`.

    Args:
        entries: entries of a step, in the order in which calls try them.
        call: the call.
    """
    entry = next((entry for entry in entries if entry.fetch(*call) is not MISS), None)
    if entry is None:
        return {}
    seconds = {"guards": _seconds_per_call(entry.fetch, call)}
    if not entry.captured.effects:
        outputs = [torch.zeros(()) for _ in entry.captured.residual.outputs]
        seconds["dispatch"] = _seconds_per_call(entry.over(lambda inputs: outputs), call)
    return seconds


def _seconds_per_call(fn: Callable[..., Any], call: Call) -> float:
    args, kwargs = call
    rounds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(_CALLS_PER_ROUND):
            fn(args, kwargs)
        rounds.append((time.perf_counter() - began) / _CALLS_PER_ROUND)
    return statistics.median(rounds)
