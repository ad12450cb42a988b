"""What the prologue of a step draws: the calls, and what stands for their arguments."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

NOW = datetime.now
CLOCKS: tuple[Callable[..., Any], ...] = (
    *(time.time, time.perf_counter, time.monotonic, time.process_time, time.thread_time),
    *(time.time_ns, time.perf_counter_ns, time.monotonic_ns, time.process_time_ns, time.thread_time_ns, NOW),
)
"""Functions that read a clock, which another call does not give back."""

FILE_TESTS: tuple[Callable[[str], Any], ...] = (
    *(os.path.exists, os.path.lexists, os.path.isfile, os.path.isdir, os.path.islink),
    *(os.path.getmtime, os.path.getsize),
)
"""Functions that ask for the state of a file by its path, which others may change at any time."""


def _of_text(method: Callable[[Path], bool]) -> Callable[[str], bool]:
    """Returns a function of a path's text that calls a method of the path."""

    @functools.wraps(method)
    def asked(text: str) -> bool:
        return method(Path(text))

    return asked


PATH_TESTS = {method: _of_text(method) for method in (Path.exists, Path.is_file, Path.is_dir, Path.is_symlink)}
"""The same as methods of ``pathlib.Path``, with functions of the path's text."""

ASKED_ONCE: frozenset[Any] = frozenset({*CLOCKS, *FILE_TESTS, *PATH_TESTS.values()})
"""Functions that are called once for a call of the step: what they returned counts."""


class Drawn(NamedTuple):
    """An earlier result, as an argument of a draw.

    Attributes:
        position: its place among the values.
    """

    position: int


class Fetched(NamedTuple):
    """An outside object, as an argument of a draw, or the generator itself.

    Attributes:
        source: where it is found at each call.
        kind: its exact type.
    """

    source: Any
    kind: type


class Rewritten(NamedTuple):
    """An outside array that a draw writes to, as its argument.

    Attributes:
        source: where it is found at each call.
        kind: its exact type.
    """

    source: Any
    kind: type


class Joined(NamedTuple):
    """The numbers of an outside list or deque with those that the step has appended, as an argument of an early call.

    Attributes:
        held: the list.
        appended: plain numbers, and what stands for others.
        removed: places of items that the step has removed before it appended these, in order.
    """

    held: Fetched
    appended: tuple[Any, ...]
    removed: tuple[int, ...] = ()


class Computed(NamedTuple):
    """A number that depends on outside values, as an argument of a draw.

    Attributes:
        program: computes it from values found at each call.
        kind: its exact type.
    """

    program: Any
    kind: type


class Draw(NamedTuple):
    """One draw of a generator of Python's or NumPy's, a change of its state, or the creation of one.

    Attributes:
        position: place of the result among the values.
        function: the unbound method, or the function.
        generator: the object it is called on: itself, :class:`Fetched` or :class:`Drawn`; ``None`` for a function.
        args: plain values, and what stands for others; tuples and lists of these.
        kwargs: the same, by name.
        kind: exact type of the result, if the step relies on it.
    """

    position: int
    function: Callable[..., Any]
    generator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: type | None = None


class Reseeding:
    """The seed of a torch generator that the step creates: a draw that sets the state to which every run resets it.

    Attributes:
        generator: the generator of the graph.
        state: that state, once it is known that the graph draws from it.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.state: torch.Tensor | None = None

    def __call__(self, seed: int) -> None:
        if self.state is not None:
            self.state.copy_(torch.Generator(self.generator.device).manual_seed(seed).get_state())


def seed_default(seed: int) -> None:
    """Seeds torch's default generator: a draw that is made before the graph draws."""
    torch.manual_seed(seed)


class Changed(Exception):
    """A value that a draw uses is of another type than at the capture."""


class EmptyTensor(NamedTuple):
    """A tensor that a draw fills, or whose layout it takes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class OwnGenerator(NamedTuple):
    """A generator of torch's that the step makes, or gets, and draws from.

    Attributes:
        held: the generator of the graph.
        state: its state before the first draw; ``None`` for the one that it has when the step begins.
        seed: what seeds it, if that changes.
    """

    held: torch.Generator
    state: torch.Tensor | None
    seed: Any


class TorchDraw(NamedTuple):
    """One draw of a generator of torch's on the CPU.

    Attributes:
        position: place of the first number among the values; ``None`` for a draw that is not read.
        operator: the random operator.
        args: its arguments.
        kwargs: its keyword arguments, but the generator.
        generator: the generator; ``None`` for the default one.
    """

    position: int | None
    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: OwnGenerator | None = None

    def __call__(self, number: Callable[[Any], Any], generator: torch.Generator | None = None) -> Any:
        """Draws; ``number`` returns an argument that is computed at each call."""
        args = [torch.empty_strided(*a[:2], dtype=a.dtype) if type(a) is EmptyTensor else a for a in self.args]
        kwargs = self.kwargs if generator is None else {**self.kwargs, "generator": generator}
        return self.operator(*(number(a) if type(a) is Computed else a for a in args), **kwargs)


def joined(held: Any, appended: list[Any], removed: tuple[int, ...] = ()) -> list[Any]:
    """Returns the items of a list or deque of numbers after some were removed and others appended."""
    items = list(held)
    for place in removed:
        del items[place]
    items += appended
    if not {*map(type, items)} <= {int, float}:
        raise Changed
    bound = None if type(held) is list else held.maxlen
    return items if bound is None else items[max(0, len(items) - bound) :]
