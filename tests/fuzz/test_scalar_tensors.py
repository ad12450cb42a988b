"""Random programs that read numbers from one-element tensors which they copy, view and write to.

``make fuzz`` runs many, ``make test`` a fixed few.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.fuzz.compare import Differs
from tests.fuzz.scalar_programs import CALLS, check

FIXED = 60
MANY = int(os.environ.get("FUZZ_N", "5000")) * 2 // 5
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PARTS = int(os.environ.get("FUZZ_PARTS", "1"))
BACKENDS = ("aot_eager", "aot_eager", "eager")


def run(seed: int) -> int:
    """Checks one program; fails with its source if it differs; returns how many calls were replayed."""
    try:
        return check(seed, BACKENDS[seed % len(BACKENDS)])
    except Differs as error:
        pytest.fail(str(error), pytrace=False)


def test_fixed_programs() -> None:
    replayed = sum(run(seed) for seed in range(FIXED))
    assert replayed > 0.9 * FIXED * CALLS, f"only {replayed} calls of {FIXED * CALLS} are replayed"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    first = 1000 + (SEED * PARTS + part) * MANY
    count = MANY // PARTS
    replayed = sum(run(first + i) for i in range(count))
    with capsys.disabled():
        print(f"\n[seeds from {first}] {count} programs, {replayed} of {CALLS * count} calls replayed", file=sys.stderr)
