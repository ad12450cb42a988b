"""Random Lightning programs with changes between batches; ``make fuzz`` runs many, ``make test`` a fixed few."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.lightning_programs import check, generate

FIXED = 4
MANY = int(os.environ.get("FUZZ_N", "5000")) // 5
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PARTS = int(os.environ.get("FUZZ_PARTS", "1"))


def run(seed: int) -> tuple[int, int]:
    source = generate(seed)
    try:
        report = check(source)
    except AssertionError as error:
        pytest.fail(f"seed {seed}: {error}\n{source}", pytrace=False)
    return report.calls, report.replays


def test_fixed_programs() -> None:
    done = [run(seed) for seed in range(FIXED)]
    calls, replays = (sum(part) for part in zip(*done, strict=True))
    assert replays > calls // 2, f"{replays} of {calls} calls replayed"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_programs(part: int) -> None:
    seeds = range(10_000 * (SEED + 1) + part, 10_000 * (SEED + 1) + MANY, PARTS)
    for seed in seeds:
        run(seed)
    print(f"Lightning programs {seeds}: no difference")
