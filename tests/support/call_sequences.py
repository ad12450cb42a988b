"""Compares the results of several calls of a step, eager and captured."""

from __future__ import annotations

from typing import Any

import torch


def course(step: Any, calls: int = 4) -> list[str]:
    """Returns, for each call of ``step(x, log)``, the log and the result or error.

    Args:
        step: takes a tensor of shape ``(2,)`` that counts the calls, and a list to write to.
        calls: number of calls.
    """
    seen = []
    for call in range(calls):
        log: list[Any] = []
        try:
            log.append(step(torch.full((2,), float(call)), log))
        except RuntimeError as error:
            log.append(str(error))
        seen.append(str([item.tolist() if isinstance(item, torch.Tensor) else item for item in log]))
    return seen
