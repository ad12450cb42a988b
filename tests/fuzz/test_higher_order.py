"""Random programs that ask for derivatives of derivatives, eager against captured.

``make fuzz`` runs many, ``make test`` a fixed few.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.fuzz.higher_order import HEADER, difference, from_seed

FIXED = 12
MANY = int(os.environ.get("FUZZ_N", "5000")) * 2 // 5
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PARTS = int(os.environ.get("FUZZ_PARTS", "1"))


def run(seed: int) -> bool:
    """Checks one program; fails with its source if it differs."""
    found, steps = difference(from_seed(seed))
    if found:
        pytest.fail(f"seed {seed}: {found}\n{from_seed(seed)[len(HEADER) :]}", pytrace=False)
    return any(step.report().replays > 0 for step in steps)


def test_fixed_programs() -> None:
    captured = sum(run(seed) for seed in range(FIXED))
    assert captured > 0.9 * FIXED, f"only {captured} of {FIXED} are captured"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    first = 1000 + (SEED * PARTS + part) * MANY
    count = MANY // PARTS
    captured = sum(run(first + i) for i in range(count))
    with capsys.disabled():
        print(f"\n[seeds from {first}] {count} programs, {captured} captured", file=sys.stderr, flush=True)
