"""Random training of deep stacks of blocks, default backend against float64: a fixed few, many under ``make fuzz``."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.compare import Differs
from tests.fuzz.region_programs import check, divided

MANY = int(os.environ.get("FUZZ_N", "5000")) // 50
SEED = int(os.environ.get("FUZZ_SEED", "0"))
_PART = 10


def run(seed: int) -> bool:
    """Checks one program; fails if it differs. Returns True if a graph of it was lowered by regions."""
    try:
        return divided(check(seed)[0])
    except Differs as error:
        pytest.fail(str(error), pytrace=False)


@pytest.mark.parametrize("seed", [369, pytest.param(34, marks=pytest.mark.slow)])
def test_fixed_programs(seed: int) -> None:
    assert run(seed), "its graph is lowered as a whole"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(max(1, MANY // _PART)))
def test_random_programs(part: int) -> None:
    first = SEED * 1_000_000 + 1000 + part * _PART
    by_regions = sum(run(first + i) for i in range(_PART))
    assert by_regions > _PART // 3, f"only {by_regions} of {_PART} are lowered by regions"
