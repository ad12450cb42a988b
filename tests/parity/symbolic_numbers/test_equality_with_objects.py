"""A changing number is equal to a number of another class, as a ``Decimal`` or a complex one, also inside C code."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sidefx_train

CASES = {
    "decimal": lambda n, s: s.decimal == n,
    "decimal, right": lambda n, s: n == s.decimal,
    "unequal": lambda n, s: (n != s.decimal) + 2 * (s.complex != n),
    "complex": lambda n, s: s.complex == n,
    "of half": lambda n, s: n / 2 == s.complex / 2,
    "in a list": lambda n, s: n in s.decimals,
    "place in a list": lambda n, s: s.decimals.index(n) if n in s.decimals else 7,
    "counted": lambda n, s: s.decimals.count(n),
    "in a tuple": lambda n, s: (n, 1) == (s.decimal, 1),
    "in a dict": lambda n, s: {"a": n} == {"a": s.decimal},
    "fraction": lambda n, s: n in [Fraction(99)],
    "of NumPy": lambda n, s: n in [np.int64(99), np.float32(100)],
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_a_number_of_another_class(name):
    def step(x, n, state):
        return x * CASES[name](n, state) + 1

    def run(fn):
        state = SimpleNamespace(
            decimal=Decimal(99), decimals=[Decimal(99), Decimal(100)], complex=complex(99), other=None
        )
        return [fn(torch.arange(3.0), n, state).tolist() for n in (98, 99, 100, 101, 99)]

    assert run(sidefx_train.compile(step, backend="eager")) == run(step)


def test_objects_that_are_no_numbers_need_no_value():
    """Comparing with ``None``, text and containers does not depend on the number."""

    def step(x, n, key):
        return x * ((n == None) + (n != key) + (n == (1,)) + (n in [None, "a", range(3)]))  # noqa: E711

    compiled = sidefx_train.compile(step, backend="eager")
    for n in range(98, 104):
        assert torch.equal(compiled(torch.ones(2), n, "a"), step(torch.ones(2), n, "a"))
    assert len(compiled.report().captures) == 2, compiled.report()
