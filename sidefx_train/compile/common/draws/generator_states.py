"""Generators of Python and NumPy whose draws can be made early and taken back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class GeneratorState(NamedTuple):
    """How the state of a class of generators is read, set, and given to a new generator."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    copy: Callable[[Any], Any]


def _copy_python(generator: random.Random) -> random.Random:
    copy = random.Random(0)
    copy.setstate(generator.getstate())
    return copy


def _copy_legacy(generator: np.random.RandomState) -> np.random.RandomState:
    copy = np.random.RandomState(type(generator._bit_generator)(0))  # type: ignore[attr-defined]
    copy.set_state(generator.get_state(legacy=False))
    return copy


def _copy_numpy(generator: np.random.Generator) -> np.random.Generator:
    bits = type(generator.bit_generator)(0)
    bits.state = generator.bit_generator.state
    return np.random.Generator(bits)


def _write_numpy(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


STATES: dict[type, GeneratorState] = {
    random.Random: GeneratorState(random.Random.getstate, random.Random.setstate, _copy_python),
    np.random.RandomState: GeneratorState(
        lambda generator: generator.get_state(legacy=False), np.random.RandomState.set_state, _copy_legacy
    ),
    np.random.Generator: GeneratorState(lambda generator: generator.bit_generator.state, _write_numpy, _copy_numpy),
}
"""The exact classes of generators whose state can be read and set; a subclass may draw otherwise."""


_GLOBAL = (random.random.__self__, np.random.rand.__self__)  # type: ignore[attr-defined]


def is_generator(value: Any) -> bool:
    """Returns True for a generator whose draws can be made early and taken back."""
    return type(value) in STATES


def is_plain_generator(value: Any) -> bool:
    """Returns True for a generator without attributes of the program, which could be other methods."""
    return is_generator(value) and (type(value) is not random.Random or vars(value).keys() == {"gauss_next"})


def is_state(value: tuple[Any, ...]) -> bool:
    """Returns True for what ``random.getstate`` returns, which only ``random.setstate`` reads."""
    return len(value) == 3 and type(value[1]) is tuple and len(value[1]) == _WORDS and type(value[0]) is int


_WORDS = 625
"""Length of the state of Python's generators."""


def is_global(generator: Any) -> bool:
    """Returns True for the generators behind the functions of the modules ``random`` and ``numpy.random``."""
    return any(generator is each for each in _GLOBAL)


def copy_of(generator: Any) -> Any:
    """Returns another generator in the same state."""
    return STATES[type(generator)].copy(generator)


def same_state(a: Any, b: Any) -> bool:
    """Returns True for equal states, in which NumPy has arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)
