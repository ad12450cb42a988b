"""Random training steps of which some calls raise: what is left afterwards, eager against captured.

``make fuzz`` runs many, ``make test`` a fixed few.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.fuzz.compare import Differs
from tests.fuzz.failing_programs import CALLS, program
from tests.fuzz.run import check

FIXED = 6
MANY = int(os.environ.get("FUZZ_N", "5000")) * 2 // 5
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PARTS = int(os.environ.get("FUZZ_PARTS", "1"))


def run(seed: int) -> int:
    """Checks one program, every fourth on ``aot_eager``; returns the number of replays."""
    backend = "eager" if seed % 4 else "aot_eager"
    try:
        return check(program(seed), backend, CALLS).replays
    except Differs as error:
        pytest.fail(f"python -m tests.fuzz.failing_programs {seed} 1 {backend}: {error}", pytrace=False)


def test_fixed_programs() -> None:
    replays = sum(run(seed) for seed in range(FIXED))
    assert replays > 0.6 * FIXED * CALLS, f"only {replays} calls are replays"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    count = MANY // PARTS
    first = 1000 + (SEED * PARTS + part) * count
    replays = sum(run(first + i) for i in range(count))
    with capsys.disabled():
        print(f"\n[seeds from {first}] {count} programs, {replays} replays", file=sys.stderr, flush=True)
