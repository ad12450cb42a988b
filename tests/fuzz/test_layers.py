"""Random chains of layers through the default backend, against float64: a fixed few, and many under ``make fuzz``."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.compare import Differs
from tests.fuzz.layers import check

FIXED = 1
"""Number of chains of each fixed sample, compiled as one step."""

MANY = int(os.environ.get("FUZZ_N", "5000"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
_PART = 10


def run(numbers: range) -> None:
    """Checks some chains; fails with the first one that differs."""
    try:
        check(numbers)
    except Differs as error:
        pytest.fail(str(error), pytrace=False)


@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_fixed_layers(first):
    run(range(first, first + FIXED))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(max(1, MANY // _PART)))
def test_many_layers(part):
    first = SEED * 1_000_000 + 10_000 + part * _PART
    run(range(first, first + _PART))
