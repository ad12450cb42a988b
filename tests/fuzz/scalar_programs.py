"""Random programs over one-element tensors, as source: copies, views, writes, and numbers read from them.

A program defines ``step(x, y)``, which returns the numbers that it read and the tensors that it made.

python -m tests.fuzz.scalar_programs FIRST COUNT [BACKEND]
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

import sidefx_train
from tests.fuzz.compare import Differs, Pairing

CALLS = 3
_MADE = (
    "{a}.clone()",
    "{a}.detach()",
    "{a}.view(1)",
    "{a}.data",
    "{a} + {n}",
    "{a} * {b}",
    "{a}.reshape(())",
    "{a}.double()",
    "{a}.view(torch.int32) if {a}.dtype is torch.float32 else {a}.clone()",
    "{a}.contiguous()",
    "torch.as_strided({a}, (1,), (1,))",
    "{a}.expand(1)",
    "({a} > {b})",
    "{a}.neg()",
)
_DONE = (
    "{a}.add_({n})",
    "{a}.mul_({n})",
    "{a}.copy_({b})",
    "{a}.fill_({n})",
    "torch._foreach_add_([{a}], {n})",
    "{a}.view(-1)[0] = {n}",
    "{a}.zero_()",
    "{a}.add_({b}.item())",
    "read.append({a}.item())",
    "read.append({a}.item())",
    "read.append(float({a}) > float({b}))",
    "if {a}.item() > {n}: {b}.add_(1)",
)


def from_seed(seed: int) -> str:
    """Returns the program of a seed."""
    choose = random.Random(seed).choice
    names, lines = ["x", "y"], []
    for _ in range(choose(range(4, 12))):
        text = choose(_MADE + _DONE)
        line = text.format(a=choose(names), b=choose(names), n=choose(("1", "2", "0.5", "3")))
        if text in _MADE:
            made = f"t{len(names) - 2}"
            line, names = f"{made} = {line}", [*names, made]
        lines.append(line)
    last = ", ".join(f"{choose(names)}.item()" for _ in range(3))
    lines += [f"read += [{last}]", f"return read, [{', '.join(names)}]"]
    return "\n    ".join(("def step(x, y):", "read = []", *lines)) + "\n"


def check(seed: int, backend: str) -> int:
    """Runs a program eagerly and captured, with other numbers at each call; returns how many calls were replayed.

    Raises:
        Differs: they differ.
    """
    source = from_seed(seed)
    space: dict[str, Any] = {"torch": torch}
    exec(source, space)
    compiled = sidefx_train.compile(space["step"], backend=backend, warmup="now", verify=0)
    draw, pairing = random.Random(seed), Pairing()
    for call in range(CALLS):
        shape = () if seed % 4 else (1,)
        x = torch.full(shape, draw.choice((3.0, 2.0, 0.5, 7.0)))
        y = torch.tensor(draw.choice((3.0, 1.0)) if seed % 3 else draw.choice((2, 5)))
        want, have = _outcome(space["step"], x.clone(), y.clone()), _outcome(compiled, x, y)
        try:
            pairing.compare(want, have, f"call {call}")
        except Differs as error:
            raise Differs(f"seed {seed}: {error}\n{source}") from None
    return compiled.report().replays


def _outcome(step: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Returns what a step returns, with its arguments, or how it raises."""
    try:
        return (*step(x, y), x, y)
    except Exception as error:
        return type(error).__name__, str(error), x, y


if __name__ == "__main__":
    first, count, backends = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or ["eager", "aot_eager"]
    for name in backends:
        print(name, sum(check(seed, name) for seed in range(first, first + count)), "calls replayed")
