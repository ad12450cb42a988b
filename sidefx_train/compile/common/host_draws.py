"""Random numbers that the prologue of a step reads: it draws them before its guards are tested and its graph runs.

A step may decide on such a number, or pass it to the graph. Numbers of Python's and NumPy's generators are drawn for
good; if a guard fails, the generators get back the states they had. A number that torch draws on the CPU is foretold:
the draws of the graph up to that number are made once more and forgotten, and the graph makes them as in eager. If the
backend has random numbers of its own, the number is drawn for good as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

_Replay = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class Draw(NamedTuple):
    """One draw of a generator of Python's or NumPy's.

    Attributes:
        position: place of the number, or array, among the values.
        function: the unbound method.
        generator: the object it is called on; ``None`` for what is computed from an earlier array.
        args: plain values.
        kwargs: plain values.
    """

    position: int
    function: Callable[..., Any]
    generator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(self.generator, *self.args, **self.kwargs)


class EmptyTensor(NamedTuple):
    """A tensor that a draw fills, or whose layout it takes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class TorchDraw(NamedTuple):
    """One draw of torch's default generator on the CPU.

    Attributes:
        position: place of the number among the values; ``None`` for a draw before it.
        operator: the random operator.
        args: its arguments.
        kwargs: its keyword arguments.
    """

    position: int | None
    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        args = [torch.empty_strided(*a[:2], dtype=a.dtype) if type(a) is EmptyTensor else a for a in self.args]
        return self.operator(*args, **self.kwargs)


class _State(NamedTuple):
    """How the state of a class of generators is read, set, and given to a new generator."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    copy: Callable[[Any], Any]


def _copy_python(generator: random.Random) -> random.Random:
    copy = random.Random(0)
    copy.setstate(generator.getstate())
    return copy


def _copy_legacy(generator: np.random.RandomState) -> np.random.RandomState:
    copy = np.random.RandomState(type(generator._bit_generator)())  # type: ignore[attr-defined]
    copy.set_state(generator.get_state(legacy=False))
    return copy


def _copy_numpy(generator: np.random.Generator) -> np.random.Generator:
    bits = type(generator.bit_generator)()
    bits.state = generator.bit_generator.state
    return np.random.Generator(bits)


def _write_numpy(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_STATES: dict[type, _State] = {
    random.Random: _State(random.Random.getstate, random.Random.setstate, _copy_python),
    np.random.RandomState: _State(
        lambda generator: generator.get_state(legacy=False), np.random.RandomState.set_state, _copy_legacy
    ),
    np.random.Generator: _State(lambda generator: generator.bit_generator.state, _write_numpy, _copy_numpy),
}
"""The exact classes of generators whose state can be read and set; a subclass may draw otherwise."""


_GLOBAL = (random.random.__self__, np.random.rand.__self__)  # type: ignore[attr-defined]


def is_generator(value: Any) -> bool:
    """Returns True for a generator whose draws can be made early and taken back."""
    return type(value) in _STATES


def is_global(generator: Any) -> bool:
    """Returns True for the generators behind the functions of the modules ``random`` and ``numpy.random``."""
    return any(generator is each for each in _GLOBAL)


def copy_of(generator: Any) -> Any:
    """Returns another generator in the same state."""
    return _STATES[type(generator)].copy(generator)


def _same(a: Any, b: Any) -> bool:
    """Returns True for equal states, in which NumPy has arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


class HostDraws:
    """The draws of one entry.

    Args:
        draws: those of Python's and NumPy's generators, in program order.
        values: the list that guards and prologue read the drawn numbers from.
        of_torch: those of torch's generator, in program order.
        foretells: the graph makes the draws of torch itself.
    """

    def __init__(
        self, draws: tuple[Draw, ...], values: list[Any], of_torch: tuple[TorchDraw, ...] = (), foretells: bool = True
    ) -> None:
        self.values = values
        self._draws, self._of_torch, self._foretells = draws, of_torch, foretells
        distinct = {id(each.generator): each.generator for each in draws if each.generator is not None}
        self._generators = [(generator, _STATES[type(generator)]) for generator in distinct.values()]
        self._before: list[Any] = []

        self._torch_before: torch.Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._draws or self._of_torch)

    def has(self, source: Any) -> bool:
        """Returns True if ``source`` leads to the drawn numbers."""
        return source is not None and source.key is self.values

    def draw(self) -> None:
        """Draws the numbers."""
        self._before = [state.read(generator) for generator, state in self._generators]
        for draw in self._draws:
            self.values[draw.position] = draw()
        if self._of_torch:
            self._torch_before = torch.default_generator.get_state()
            for each in self._of_torch:
                number = each()
                if each.position is not None:
                    self.values[each.position] = number.item()
            if self._foretells:
                torch.default_generator.set_state(self._torch_before)

    def take_back(self) -> None:
        """Sets the generators to the states before the latest :meth:`draw`; the values stay, for messages.

        A generator from which another thread has drawn since is left: its numbers must not be drawn twice.
        """
        for (generator, state), before in zip(self._generators, self._before, strict=True):
            if self._is_as_left(generator, state, before):
                state.write(generator, before)
        if self._torch_before is not None:
            torch.default_generator.set_state(self._torch_before)

    def _is_as_left(self, generator: Any, state: _State, before: Any) -> bool:
        """Returns True if a generator is in the state that the draws from ``before`` led to."""
        copy = state.copy(generator)
        state.write(copy, before)
        for draw in self._draws:
            if draw.generator is generator:
                draw.function(copy, *draw.args, **draw.kwargs)
        return _same(state.read(copy), state.read(generator))

    def before(self, replay: _Replay, miss: Any, keep: bool = True) -> _Replay:
        """Returns ``replay`` behind the draws, which are taken back if it returns ``miss``, or always without
        ``keep``."""
        if not self:
            return replay

        def drawing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.draw()
            result = replay(args, kwargs)
            if result is miss or not keep:
                self.take_back()
            return result

        return drawing

    def taken_back_before(self, failed: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``failed``, which runs the step eagerly, behind :meth:`take_back`."""
        if not self:
            return failed

        def after(*args: Any) -> Any:
            self.take_back()
            return failed(*args)

        return after
