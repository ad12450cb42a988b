"""The first runs of a compiled graph beside the captured graph run op by op."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sidefx_train.compile.artifacts import Executable, TracedGraph
from sidefx_train.compile.backend.anew import beginning_anew
from sidefx_train.compile.backend.eager import build_eager
from sidefx_train.compile.graphs import generators

RELATIVE = 1e-3
"""Largest difference, in norm and relative to the oracle's value, that counts as equal."""


def verified(
    executable: Executable, traced: TracedGraph, runs: int, comparable: bool, report: Callable[[str], None]
) -> Executable:
    """Compares the first ``runs`` runs with the captured graph run op by op, which is eager's own arithmetic.

    The results of compared runs are the op-by-op ones. If a run differs, ``report`` is told and the compiled graph is
    never used again.

    Args:
        executable: the compiled graph.
        traced: the captured graph.
        runs: how many runs to compare.
        comparable: false if the two draw different random numbers: nothing can be compared then.
        report: told in words what differs.
    """
    if not comparable:
        return replace(executable, notes=(*executable.notes, "not verified: it draws random numbers of its own"))
    oracle = beginning_anew(build_eager(traced), traced)
    drawn_from = [torch.default_generator, *generators(traced.module)]
    left = runs
    trusted = True

    def set_back(states: list[torch.Tensor]) -> None:
        for generator, state in zip(drawn_from, states, strict=True):
            generator.set_state(state)

    def run(args: list[Any]) -> Sequence[Any]:
        nonlocal left, trusted
        if not trusted:
            return oracle.run(args)
        if left <= 0:
            return executable.run(args)
        left -= 1
        states = [generator.get_state() for generator in drawn_from]
        copies, twins = _copies(args), _copies(args)
        have = list(executable.run(list(copies)))
        set_back(states)
        want = list(oracle.run(list(twins)))
        set_back(states)
        found = _difference(have, want, "output") or _difference(copies, twins, "input")
        if found:
            trusted = False
            report(found)  # may raise: nothing has been changed so far
        return oracle.run(args)

    notes = (*executable.notes, f"first {runs} runs compared with the captured graph")
    return replace(executable, run=run, notes=notes)


def _copies(args: list[Any]) -> list[Any]:
    """Copies of the tensors; what shares memory is copied with the memory."""
    storages = Counter(value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor))
    memo: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shared = storages[value.untyped_storage().data_ptr()] > 1
        return copy.deepcopy(value.detach(), memo) if shared else value.detach().clone()

    return [copied(value) for value in args]


def _difference(have: list[Any], want: list[Any], what: str) -> str:
    for index, (a, b) in enumerate(zip(have, want, strict=True)):
        if isinstance(b, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"{what} {index} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
            a, b = torch.nan_to_num(a.detach().double()), torch.nan_to_num(b.detach().double())
            error, scale = (a - b).norm().item(), b.norm().item()
        elif isinstance(b, float):
            if math.isnan(a) and math.isnan(b):
                continue
            error, scale = abs(a - b), abs(b)
        else:
            error, scale = float(a != b), 0.0
        if error > RELATIVE * scale + 1e-6:
            return f"{what} {index} is off by {error:.3g} in norm, its norm is {scale:.3g}"
    return ""
