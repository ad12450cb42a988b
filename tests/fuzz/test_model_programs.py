"""Random uses of a compiled model as a module; ``make fuzz`` runs many, ``make test`` a fixed few."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.model_programs import check

FIXED = 6
MANY = int(os.environ.get("FUZZ_N", "5000")) // 5
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PARTS = int(os.environ.get("FUZZ_PARTS", "1"))


def run(seed: int) -> None:
    try:
        check(seed)
    except AssertionError as error:
        pytest.fail(f"seed {seed}: {error}", pytrace=False)


@pytest.mark.parametrize("seed", range(FIXED))
@pytest.mark.every(2)
def test_fixed_programs(seed: int) -> None:
    run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_programs(part: int) -> None:
    seeds = range(10_000 * (SEED + 1) + part, 10_000 * (SEED + 1) + MANY, PARTS)
    for seed in seeds:
        run(seed)
    print(f"uses of models {seeds}: no difference")
