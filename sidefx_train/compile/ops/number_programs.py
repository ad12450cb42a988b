"""Python's own functions of numbers that only the graph knows, called by an operator when the graph runs.

``math.gcd(n, 4)`` of a number that the graph computes has no form on tensors that is exact for every integer. The
operator evaluates a Python expression, whose operands are 0-dim tensors on the host: integers in ``int64``, floats in
``float64``. So arithmetic between them is Python's, too, with integers of any length.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train.compile.ops.registration import define_operator

_KINDS: dict[torch.dtype, type] = {torch.int64: int, torch.float64: float, torch.bool: bool}


@functools.lru_cache(maxsize=4096)
def _program(code: str, operands: int) -> Callable[..., Any]:
    names = ", ".join(f"a{position}" for position in range(operands))
    lines = "".join(f"    {line}\n" for line in code.split("\n"))
    space: dict[str, Any] = {"math": math, "operator": operator}
    exec(f"def program({names}):\n{lines}", space)
    return space["program"]  # type: ignore[no-any-return]


def _run(code: str, numbers: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        result = _program(code, len(numbers))(*(number.item() for number in numbers))
        if type(result) is not _KINDS[dtype]:
            raise TypeError(f"the result is of type {type(result).__name__}")
        made = torch.tensor(result, dtype=dtype, device="cpu")
    except (ValueError, TypeError, ArithmeticError, RuntimeError):  # the last of an integer of more than 64 bits
        return torch.zeros((), dtype=dtype, device="cpu"), torch.ones((), dtype=torch.bool, device="cpu")
    return made, torch.zeros((), dtype=torch.bool, device="cpu")


def _fake(code: str, numbers: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty((), dtype=dtype, device="cpu"), torch.empty((), dtype=torch.bool, device="cpu")


define_operator(
    "number_program(str code, Tensor[] numbers, ScalarType dtype) -> (Tensor result, Tensor failed)",
    _run,
    _fake,
    key="CompositeExplicitAutograd",
)

NUMBER_PROGRAM = torch.ops.sidefx.number_program.default
"""``number_program(code, numbers, dtype)`` runs the body of a Python function of ``a0, a1, ...``. If it raises, or
returns a number that is not of ``dtype``, the second result is true, and the first is zero."""
