"""Computes Inductor's random numbers with torch operators: what its generated C++ draws on a CPU.

A graph draws seeds from torch's generator; each number is the first of Philox's output (4x32, 10 rounds) for its seed
and its position. Source: Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3*, SC 2011; torch's
``ATen/core/PhiloxRNGEngine.h`` and ``_inductor/lowering.py`` say how seeds and positions are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_WORD = 0xFFFFFFFF
_KEYS = (0x9E3779B9, 0xBB67AE85)
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_ROUNDS = 10
_SCALE = 4.6566127342e-10
"""Scales 31 bits to a number from 0 to 1, exclusive."""


def philox(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first two words of the output at the positions from 0 to ``count``, exclusive, as int64."""
    zero = torch.zeros(count, dtype=torch.int64)
    words = [torch.arange(count, dtype=torch.int64) & _WORD, zero, zero, zero]
    keys = [seed & _WORD, 0]  # generated code passes 32 bits of the seed
    for _ in range(_ROUNDS):
        low, high = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (high >> 32 & _WORD) ^ words[1] ^ keys[0],
            high & _WORD,
            (low >> 32 & _WORD) ^ words[3] ^ keys[1],
            low & _WORD,
        ]
        keys = [key + step & _WORD for key, step in zip(keys, _KEYS, strict=True)]
    return words[0], words[1]


def seeds(count: int, device: Any = None) -> torch.Tensor:
    """Draws seeds from torch's generator, int64 ``[count]``."""
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, [count])


def seed(device: Any = None) -> torch.Tensor:
    """Draws one seed, a 0-dim int64."""
    return seeds(1)[0]


def look_up(known: torch.Tensor, index: int) -> torch.Tensor:
    """Returns one of several seeds."""
    return known[index]


def random(size: list[int], seed: torch.Tensor, mode: str, **_: Any) -> torch.Tensor:
    """Returns numbers from a uniform (``"rand"``) or a normal distribution (``"randn"``), float32 of a given size."""
    first, second = (_uniform(word) for word in philox(int(seed), math.prod(size)))
    if mode == "rand":
        return first.reshape(size)
    radius, angle = torch.sqrt(-2.0 * torch.log(1 - first)), torch.cos((1 - second).double() * (2.0 * math.pi))
    return (radius.double() * angle).float().reshape(size)


def randint(low: int, high: int, size: list[int], seed: torch.Tensor) -> torch.Tensor:
    """Returns integers from ``low`` to ``high``, exclusive, int64 of a given size."""
    first, second = philox(int(seed), math.prod(size))
    span = high - low  # a 64-bit unsigned number, split since only 63 bits are available
    whole = ((second % span) * (2**32 % span) + first % span) % span if span < 2**31 else first | second << 32
    return (whole % span + low).reshape(size)


def _uniform(word: torch.Tensor) -> torch.Tensor:
    return (word & 0x7FFFFFFF).float() * torch.tensor(_SCALE, dtype=torch.float32)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "prims::inductor_seed": seed,
    "prims::inductor_seeds": seeds,
    "prims::inductor_lookup_seed": look_up,
    "prims::inductor_random": random,
    "prims::inductor_randint": randint,
}
"""Functions for Inductor's random operators, by name."""


def drawing_functions(graph: fx.Graph) -> dict[Any, Callable[..., Any]]:
    """Returns the functions of those operators of a graph that draw Inductor's random numbers."""
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    named = {target: getattr(getattr(target, "_schema", None), "name", "") for target in targets}
    return {target: FUNCTIONS[name] for target, name in named.items() if name in FUNCTIONS}
