"""Integers that the graph computes, in generated code: exact, of the type and with the promotion of Python's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sidefx_train

ON_INTEGERS: dict[str, Any] = {
    "product": lambda z, n: z * n,
    "sum": lambda z, n: z + n,
    "difference": lambda z, n: n - z,
    "scaled sum": lambda z, n: z.add(z, alpha=n),
    "remainder": lambda z, n: z % n,
    "floor": lambda z, n: torch.div(z, n, rounding_mode="floor"),
    "quotient": lambda z, n: z / n,
    "full": lambda z, n: torch.full((3,), n),
    "filled": lambda z, n: z.clone().fill_(n),
    "chosen": lambda z, n: torch.where(z > n, z, n),
    "list": lambda z, n: torch.tensor([n, 1]),
    "bounds": lambda z, n: z.clamp(max=n),
    "equal": lambda z, n: z == n,
    "truths": lambda z, n: (z > 2**27 + 5) * n,
    "small integers": lambda z, n: z.to(torch.int32) * n,
    "search": lambda z, n: torch.searchsorted(z, n),
    "bucket": lambda z, n: torch.bucketize(n, z),
    "floats": lambda z, n: z.double() * n,
    "list of tensors": lambda z, n: torch._foreach_mul([z, z.float()], n)[0],
}
OF_NUMBERS: dict[str, Any] = {
    "sum of numbers": lambda z, n: z + (n + 1),
    "product of numbers": lambda z, n: z * (n * 3),
    "quotient of numbers": lambda z, n: z.double() * (n / 3),
    "floor of numbers": lambda z, n: z + n // 3,
    "remainder of numbers": lambda z, n: z + n % 5,
    "remainder of a constant": lambda z, n: z + 17 % n,
    "power": lambda z, n: z + n**2,
    "remainder of a power": lambda z, n: z + n**3 % 7,
    "bits": lambda z, n: z + ((n & 12) | (n ^ 5)),
    "negative": lambda z, n: z + -n,
    "absolute": lambda z, n: z + abs(n),
    "greater": lambda z, n: z + max(n, 4),
    "float": lambda z, n: z * float(n),
    "floats and integers": lambda z, n: z.double() * (n * 0.5 + n),
    "rounded": lambda z, n: z + round(n, -1),
    "half": lambda z, n: z + int(n / 2),
}
NUMBERS = (5, 7, 2**30 + 3, -3, 2, 2**52 - 3, 2**55 + 3, -(2**62))


def outcomes(step, numbers):
    z = torch.arange(4) * 2**25 + 2**27 + 1
    found = []
    for number in numbers:
        try:
            found.append(step(torch.tensor([number, 0]), z))
        except (RuntimeError, ArithmeticError) as error:
            found.append(type(error))
    return found


@pytest.mark.parametrize("name", [*ON_INTEGERS, *OF_NUMBERS])
@pytest.mark.covering(1)
def test_generated_code_has_the_integer(name):
    function = (ON_INTEGERS | OF_NUMBERS)[name]

    def step(number, z):
        n = int(number.sum())
        return function(z, n), n

    compiled = sidefx_train.compile(step, backend="inductor", keep_slower=True)
    for expected, found in zip(outcomes(step, NUMBERS), outcomes(compiled, NUMBERS), strict=True):
        if isinstance(expected, type):
            assert found is expected
            continue
        assert torch.equal(found[0], expected[0]) and found[0].dtype is expected[0].dtype
        assert found[1] == expected[1]
    assert not compiled.report().breaks, str(compiled.report())


def test_a_negative_power_of_integers_raises():
    def step(number, z):
        return (z % 7) ** int(number.sum())

    compiled = sidefx_train.compile(step, backend="inductor", keep_slower=True)
    for expected, found in zip(outcomes(step, (2, 3, -3)), outcomes(compiled, (2, 3, -3)), strict=True):
        assert found is expected or torch.equal(found, expected)


def test_numbers_that_do_not_fit_run_eagerly():
    def step(number, z):
        n = int(number.sum())
        return z + n * n % 1000, n * n

    compiled = sidefx_train.compile(step, backend="inductor", keep_slower=True)
    for number in (5, 2**40 + 1):
        z = torch.arange(3)
        expected, found = step(torch.tensor([number, 0]), z), compiled(torch.tensor([number, 0]), z)
        assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
    assert [each.code for each in compiled.report().fallbacks] == ["SFX208"]
