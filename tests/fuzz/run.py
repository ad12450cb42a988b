"""Runs a program eagerly and captured, and compares the two worlds after every call."""

from __future__ import annotations

import contextlib
import io
import linecache
import math
import re
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.fuzz.compare import Differs, Pairing

CALLS = 4
_FILE = "<fuzz program>"


@dataclass
class Outcome:
    """Result of one program.

    Attributes:
        calls: number of calls.
        replays: calls that ran as a captured graph.
        reasons: codes and reasons of the others.
    """

    calls: int = 0
    replays: int = 0
    reasons: tuple[str, ...] = ()


_ADDRESS = re.compile(r"0x[0-9a-f]+|(?<=, which is )output .* of .* instead")
"""Addresses in default reprs, which differ in every world. The same holds for the autograd node in torch's errors."""


class _World:
    """One run of the program, in a module of its own."""

    def __init__(self, source: str, backend: str | None) -> None:
        module = types.ModuleType("fuzz_program")
        sys.modules[module.__name__] = module  # dataclasses look their module up
        exec(compile(source, _FILE, "exec"), vars(module))
        torch.manual_seed(0)
        self.step, self.between, self.arguments, self.roots = module.build()
        self.compiled = None if backend is None else sidefx_train.compile(self.step, backend=backend)

    def call(self, index: int) -> tuple[Any, str]:
        """Runs one call; returns its value or exception (as plain data), and the printed text."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            torch.manual_seed(50 + index)  # the worlds share the process's generator, and ``between`` may draw
            if index:
                try:
                    self.between(index)
                except Exception as error:  # the code between two calls may raise, but must raise the same in both
                    print("between:", type(error).__name__, error)
            arguments = self.arguments(index)
            torch.manual_seed(100 + index)
            try:
                value: Any = ("returned", (self.compiled or self.step)(*arguments))
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                lines = [frame.lineno for frame in frames if frame.filename == _FILE]
                value = ("raised", type(error).__name__, _ADDRESS.sub("0x...", str(error)), lines)
        return (value, arguments), _ADDRESS.sub("0x...", printed.getvalue())


_REPLACED: tuple[tuple[Any, str], ...] = (
    (F, "relu"),
    (torch, "relu"),
    (math, "sqrt"),
    (torch.Tensor, "sigmoid"),
    (nn.Linear, "forward"),
)
"""Functions that programs replace."""


@contextlib.contextmanager
def _libraries_restored() -> Iterator[None]:
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name in _REPLACED]
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is not _ABSENT:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)


_ABSENT = object()
_SECONDS = 20
"""Time limit of an eager call: some programs append to a list that they iterate over, without end."""


class _Endless(BaseException):
    """A program that does not end."""


@contextlib.contextmanager
def _ends() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise _Endless

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(source: str, backend: str = "eager", calls: int = CALLS) -> Outcome:
    """Compares the program's two worlds; a program that never ends eagerly does not count.

    Raises:
        Differs: they differ; the message shows where.
    """
    linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
    with warnings.catch_warnings(), _libraries_restored():
        warnings.simplefilter("ignore")
        eager, captured = _World(source, None), _World(source, backend)
        pairing = Pairing()
        spaces = [eager.roots(), captured.roots()]
        pairing.compare(*spaces, "at the start")
        raised = False
        for index in range(calls):
            try:
                with _ends():
                    want, said = eager.call(index)
            except _Endless:
                return Outcome()
            have, heard = captured.call(index)
            here = f"call {index}"
            raised = raised or want[0][0] == "raised"
            if said != heard:
                raise Differs(f"{here}: printed {heard!r}, eager printed {said!r}")
            pairing = Pairing()
            pairing.compare(want, have, here)
            pairing.compare(eager.roots(), captured.roots(), f"after {here}")
    report = captured.compiled.report()
    reasons = tuple(f"{item.code} {item.reason}" for item in report.breaks + report.fallbacks)
    ours = ["SFX205"]
    if not raised:  # an object that leaves a step that raises may be reported under this code
        ours.append("SFX204")
    if backend == "eager":  # another backend may refuse a graph
        ours.append("SFX201")
    internal = [reason for reason in reasons if reason.startswith(tuple(ours))]
    if internal:
        raise Differs(f"internal error: {internal[0]}")
    return Outcome(calls, report.replays, reasons)


if __name__ == "__main__":
    print(check(open(sys.argv[1]).read()))
