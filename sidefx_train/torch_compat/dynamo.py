"""State that ``torch.compile``'s own tracer leaves on functions and modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def without_torch_compile() -> Iterator[None]:
    """Context in which backwards run in the autograd engine, also inside ``torch._dynamo.compiled_autograd``.

    What the first call of ``torch.compiler.disable`` in a process notes is noted before: a capture makes such calls.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None:
        frames.cached_backends.setdefault(id(None), None)
    change = torch._C._dynamo.compiled_autograd.set_autograd_compiler
    before = change(None, False)
    try:
        yield
    finally:
        change(*before)
