"""State that ``torch.compile``'s own tracer leaves on functions and modules."""

from __future__ import annotations

import sys
from typing import Any

import torch

traced_by_dynamo = torch.compiler.is_dynamo_compiling
"""``traced_by_dynamo()`` is True while torch's own compiler traces the caller; it treats the result as a constant."""


def assumes_constant(fn: Any) -> bool:
    """Returns True for a function that ``torch.compiler.assume_constant_result`` was applied to."""
    return bool(getattr(fn, "_dynamo_marked_constant", False))


def module_tagging() -> Any:
    """Returns the function that ``torch.compile``, once used, calls for every new module; ``None`` before."""
    tracker = getattr(sys.modules.get("torch._dynamo.mutation_guard"), "GenerationTracker", None)
    return None if tracker is None else tracker.tag.__func__
