"""Captures a step: runs it on shadows (``capture_run.py``) until a run with the right specialization succeeds.

A capture that stops is repeated up to the instruction that stopped it (capture/resume/): the graph so far is compiled
the same way, and its entry continues natively and with further parts. Nothing outside is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.capture.resume.suspension import StopPoint
from sidefx_train.compile.pipeline.capture_run import CaptureRun
from sidefx_train.compile.pipeline.captured import Captured, CaptureFailed, StopGuard
from sidefx_train.compile.pipeline.replaced_builtins import replaced_arithmetic

_MAX_RESTARTS = 5


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    spec: Specialization,
    in_parts: bool = True,
    in_order: bool = False,
) -> Captured:
    """Captures a step, or its first part.

    Args:
        fn: the step.
        args: its real positional arguments; they are not changed.
        kwargs: its keyword arguments.
        name: for generated code.
        spec: specialization from earlier calls.
        in_parts: if the whole step cannot be captured, capture the part before the instruction that stops it.
        in_order: gradients with outside contributions must be added in eager's order.

    Raises:
        CaptureFailed: the step cannot be captured; nothing outside was changed.
    """

    needed: list[Specialization] = []

    def once(known: Specialization, point: StopPoint | None) -> Captured | Specialization | StopPoint:
        needed.append(known)
        return CaptureRun(fn, args, kwargs, name, known, point, in_order).run()

    replaced = replaced_arithmetic()
    if replaced:
        why = f"builtins.{replaced} is replaced, with which torch computes sizes and conditions of the capture"
        raise CaptureFailed("SFX111", why, None, StopGuard(lambda args, kwargs: bool(replaced_arithmetic()), ()))
    overriding = compat.overriding_kernel()
    if overriding:
        why = f"a kernel of {overriding} is replaced, which compiled code does not call"
        raise CaptureFailed("SFX111", why, None, StopGuard(lambda args, kwargs: bool(compat.overriding_kernel()), ()))
    if torch.cuda.is_initialized():
        with compat.outside_tracing():
            compat.settle_cuda()
    try:
        return _attempt(once, spec, None)
    except CaptureFailed as error:
        stop = error
    spec = replace(spec, endless_branches=spec.endless_branches | stop.endless_branches)
    # Not in the handler: the handled exception that the step sees must be its callers'.
    try:
        if not stop.raised:
            for point in stop.points if in_parts else (each for each in stop.points if each.native):
                try:
                    return _attempt(once, spec, point)
                except CaptureFailed as again:
                    stop.without_break = stop.without_break or again.reason
                    if again.code == "SFX107":  # autograd cannot be split there, nor further out
                        break
        if any(known.assumes_nothing for known in needed) and not spec.assumes_nothing:
            # A part may not assume the conditions before its end: it ends at the first of them instead.
            spec = replace(spec, assumes_nothing=True)
            return capture(fn, args, kwargs, name, spec, in_parts, in_order)
        if any(known.native_lookups for known in needed) and not spec.native_lookups:
            return capture(fn, args, kwargs, name, replace(spec, native_lookups=True), in_parts, in_order)
        raise stop
    finally:
        del stop  # its traceback holds this frame, and what all callers hold


_Once = Callable[[Specialization, StopPoint | None], Captured | Specialization | StopPoint]


def _attempt(once: _Once, spec: Specialization, point: StopPoint | None) -> Captured:
    """Captures a step, up to ``point`` if that is given, with the specialization that it turns out to need."""
    for _ in range(_MAX_RESTARTS):
        try:
            outcome = once(spec, point)
        except CaptureFailed as stop:
            stop.endless_branches = spec.endless_branches
            raise
        if isinstance(outcome, Captured):
            return outcome
        if isinstance(outcome, StopPoint):
            captured = _before_rest(once, spec, outcome)
            if captured is not None:
                return captured
            outcome = replace(spec, native_rest=False)
        spec = outcome
    raise CaptureFailed("SFX204", "every attempt changed the specialization of the step", None, None)


def _before_rest(once: _Once, spec: Specialization, rest: StopPoint) -> Captured | None:
    """Captures a step up to its native rest; returns ``None`` if it cannot be suspended there."""
    try:
        return _attempt(once, spec, rest)
    except CaptureFailed:
        return None
