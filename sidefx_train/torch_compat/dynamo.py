"""What ``torch.compile``'s own tracer leaves on functions and modules."""

from __future__ import annotations

import sys
from typing import Any

import torch


def traced_by_dynamo() -> bool:
    """True while torch's own compiler traces the caller, which takes the answer for a constant."""
    return torch.compiler.is_dynamo_compiling()


def assumes_constant(fn: Any) -> bool:
    """True for what ``torch.compiler.assume_constant_result`` was called with."""
    return bool(getattr(fn, "_dynamo_marked_constant", False))


def module_tagging() -> Any:
    """What ``torch.compile``, once used, calls for every module that is made, to know new ones; ``None`` before."""
    tracker = getattr(sys.modules.get("torch._dynamo.mutation_guard"), "GenerationTracker", None)
    return None if tracker is None else tracker.tag.__func__
