"""Random programs of Python's arithmetic on numbers that change from call to call.

``make fuzz`` runs many, ``make test`` a fixed few.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.fuzz.compare import Differs
from tests.fuzz.number_programs import CALLS, WITH_TRUTHS, check

FIXED = (*range(40), 110, 205, 236, 274, 292, 336, *range(WITH_TRUTHS + 14, WITH_TRUTHS + 34))
"""Some; those above 40 and below a million gave wrong values once."""
MANY = int(os.environ.get("FUZZ_N", "5000")) * 2 // 5
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PARTS = int(os.environ.get("FUZZ_PARTS", "1"))


def run(seed: int) -> int:
    """Checks one program; fails with its source if it differs; returns how many calls were replayed."""
    try:
        return check(seed, "eager")
    except Differs as error:
        pytest.fail(str(error), pytrace=False)


def test_fixed_programs() -> None:
    replayed = sum(map(run, FIXED))
    assert replayed > 0.9 * len(FIXED) * CALLS, f"only {replayed} calls of {len(FIXED) * CALLS} are replayed"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    first = 1000 + (SEED * PARTS + part) * MANY
    count = MANY // PARTS
    replayed = sum(run(first + i + WITH_TRUTHS * (i % 2)) for i in range(count))
    with capsys.disabled():
        print(f"\n[seeds from {first}] {count} programs, {replayed} of {CALLS * count} calls replayed", file=sys.stderr)
