"""Random programs of Python's arithmetic on numbers that change from call to call, as source.

A program defines ``step(x, a, b, c)``. The numbers are also infinite, NaN, zeros of both signs, and beyond 32 bits. The
result of an expression is returned, multiplied into a tensor, used as a size, formatted, or decides a branch.

python -m tests.fuzz.number_programs FIRST COUNT [BACKEND]
"""

from __future__ import annotations

import logging
import math
import random
import sys
from typing import Any

import torch

import sidefx_train
from tests.fuzz.compare import Differs

CALLS = 8
WITH_TRUTHS = 10**6
"""From this seed on, one or two of the numbers are truth values."""

_TRUTHS = (False, True)
_INTEGERS = (0, 1, -1, 2, 3, 5, -7, 10, 64, 1000, 2**31, -(2**33))
_FLOATS = (0.0, -0.0, 0.1, -2.5, 0.5, 1.5, 3.0, -7.0, 1e10, 1e-7, 1e300, math.inf, -math.inf, math.nan)
_LITERALS = ("0", "1", "2", "-1", "-3", "7", "0.5", "-0.0", "0.0", "2.0", "math.inf", "-math.inf", "True", "False")
_OF_INTEGERS = ("&", "|", "^", "<< 3 >>")
_INFIX = ("+", "-", "*", "/", "//", "%", "<", "<=", "==", "!=", ">", ">=", "and", "or")
_CALLS = ("min", "max", "math.fmod", "math.copysign", "math.atan2", "math.hypot", "math.isclose")
_UNARY = (
    *("abs", "int", "float", "bool", "round", "math.floor", "math.ceil", "math.trunc", "math.sqrt", "math.exp"),
    *("math.tanh", "math.sin", "math.log1p", "math.isnan", "math.isfinite", "-", "not "),
)
_USES = (
    "return x + 1, r, type(r)",
    "return x * r",
    "return torch.zeros(int(abs(r)) % 5 if abs(r) < 1e6 else 2).numel() + x.sum()",
    "return x * 2 if r else x - 1",
    "return x * float(r), f'{r}'",
)
_USES_OF_TRUTHS = (
    "return x[b:], (3, 4)[bool(r)], [r, b], c is True",
    "return torch.tensor([r, b, 1]), x * b + c",
)


def _expression(choose: random.Random, depth: int, infix: tuple[str, ...]) -> str:
    if not depth or choose.random() < 0.15:
        return choose.choice(("a", "a", "b", "b", "c")) if choose.random() < 0.75 else choose.choice(_LITERALS)
    left, right, last = (_expression(choose, depth - 1, infix) for _ in range(3))
    kind = choose.random()
    if kind < 0.3:
        return f"({choose.choice(_UNARY)}({left}))"
    if kind < 0.7:
        return f"(({left}) {choose.choice(infix)} ({right}))"
    if kind < 0.85:
        return f"{choose.choice(_CALLS)}({left}, {right})"
    return choose.choice(
        (
            f"(({left}) if ({right}) else ({last}))",
            f"divmod({left}, {right})[{choose.choice((0, 1))}]",
            f"round({left}, {choose.choice((0, 1, 2, -1))})",
            f"(({left}) ** min(max({right}, -3), 4))",
        )
    )


def from_seed(seed: int) -> tuple[str, list[tuple[Any, ...]]]:
    """Returns the program of a seed, and the numbers of its calls."""
    choose = random.Random(seed)
    infix = _INFIX if seed % 3 else (*_INFIX, *_OF_INTEGERS)
    uses = (*_USES, *_USES_OF_TRUTHS) if seed >= WITH_TRUTHS else _USES
    expression, use = _expression(choose, choose.choice((1, 2, 2, 3)), infix), choose.choice(uses)
    source = f"def step(x, a, b, c):\n    r = {expression}\n    {use}\n"
    kinds = [choose.choice((_INTEGERS, _FLOATS if seed % 3 else _INTEGERS)) for _ in range(2)] + [_INTEGERS]
    if seed >= WITH_TRUTHS:
        kinds[1:] = _TRUTHS, choose.choice((_TRUTHS, _INTEGERS))
    return source, [tuple(map(choose.choice, kinds)) for _ in range(CALLS)]


def _outcome(step: Any, numbers: tuple[Any, ...]) -> str:
    try:
        made = step(torch.tensor([1.0, -2.0], dtype=torch.float64), *numbers)
    except (ArithmeticError, ValueError, TypeError) as error:
        return repr(error)
    return repr(
        [each.tolist() if isinstance(each, torch.Tensor) else each for each in torch.utils._pytree.tree_leaves(made)]
    )


def check(seed: int, backend: str) -> int:
    """Runs a program eagerly and captured, with other numbers at each call; returns how many calls were replayed.

    Raises:
        Differs: they differ.
    """
    source, calls = from_seed(seed)
    space: dict[str, Any] = {"torch": torch, "math": math}
    exec(source, space)
    compiled = sidefx_train.compile(space["step"], backend=backend, warmup="now", keep_slower=True)
    for numbers in calls:
        want, have = _outcome(space["step"], numbers), _outcome(compiled, numbers)
        if want != have:
            raise Differs(f"seed {seed}, numbers {numbers}: {have}, eager has {want}\n{source}")
    return compiled.report().replays


if __name__ == "__main__":
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + count):
        try:
            check(seed, sys.argv[3] if len(sys.argv) > 3 else "eager")
        except Differs as error:
            print(error, flush=True)
