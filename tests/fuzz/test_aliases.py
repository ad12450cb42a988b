"""Random programs over views and in-place operations, eager against captured.

``make fuzz`` runs many, ``make test`` a fixed few.
"""

from __future__ import annotations

import logging
import os
import random

import pytest

from tests.fuzz.alias_programs import generate
from tests.fuzz.alias_run import check
from tests.fuzz.compare import Differs
from tests.fuzz.shrink import shrink

FIXED = 20
MANY = int(os.environ.get("FUZZ_N", "5000")) * 2
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PARTS = int(os.environ.get("FUZZ_PARTS", "1"))


@pytest.fixture(autouse=True)
def quiet():
    """Silences torch's log messages about programs that raise."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def run(source: str) -> bool:
    """Checks one program; fails with a shorter one that differs, as runnable source."""
    try:
        return check(source).replays > 0
    except Differs as error:
        said = str(error)
    shorter = shrink(source, lambda text: bool(_differs(text)), most=150)
    pytest.fail(f"{_differs(shorter) or said}\n{shorter}", pytrace=False)


def _differs(source: str) -> str:
    try:
        check(source)
    except Differs as error:
        return str(error)
    except Exception:  # the shorter program is invalid: no counterexample
        return ""
    return ""


def test_fixed_programs() -> None:
    captured = sum(run(generate(random.Random(number).randrange)) for number in range(FIXED))
    assert captured > FIXED / 2, f"only {captured} of {FIXED} are captured"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    captured = 0
    share = MANY // PARTS
    for number in range(share):
        captured += run(generate(random.Random(1_000_000 * SEED + share * part + number).randrange))
        if number % 500 == 499:
            with capsys.disabled():
                print(f"\n{number + 1} programs over views agree with eager, {captured} captured", flush=True)
