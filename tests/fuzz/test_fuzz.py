"""Random training steps, eager against captured.

``make fuzz`` runs many (``make fuzz N=20000``, ``SEED=7`` for others); ``make test`` runs a fixed few.
"""

from __future__ import annotations

import os
import random
import sys

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.compare import Differs
from tests.fuzz.generate import from_seed, generate
from tests.fuzz.run import Outcome, check
from tests.fuzz.shrink import shrink
from tests.fuzz.templates import BREAKS

FIXED = 10
MANY = int(os.environ.get("FUZZ_N", "5000"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PARTS = int(os.environ.get("FUZZ_PARTS", "1"))
_BEGIN = "# --- program"


class Tally:
    """Counts the programs by outcome, and how many of those that could be captured whole were."""

    def __init__(self) -> None:
        self.programs = self.whole = self.captured = self.calls = self.replays = 0

    def add(self, outcome: Outcome, source: str) -> None:
        self.programs += 1
        self.calls += outcome.calls
        self.replays += outcome.replays
        step = source[source.index("def build(") :]
        if not any(part in step for part in BREAKS):
            self.whole += 1
            self.captured += outcome.replays > 0

    def __str__(self) -> str:
        share = self.captured / max(1, self.whole)
        return (
            f"{self.programs} programs agree with eager; {self.whole} without breaks, {self.captured} of them captured "
            f"({share:.1%}), {self.replays} of {self.calls} calls replayed"
        )


def backend_of(source: str) -> str:
    """Returns the backend: one program in eight runs the functionalized graph."""
    return "aot_eager" if random.Random(len(source)).randrange(8) == 0 else "eager"


def run(source: str, tally: Tally) -> None:
    """Checks one program; fails with a shorter one that differs, as runnable source."""
    backend = backend_of(source)
    try:
        tally.add(check(source, backend), source)
    except Differs as error:
        shorter = shrink(source, lambda text: _differs(text, backend))
        found = _differs(shorter, backend)
        pytest.fail(f"backend={backend!r}: {found or error}\n{_BEGIN}\n{shorter}", pytrace=False)


def _differs(source: str, backend: str) -> str:
    try:
        check(source, backend)
    except Differs as error:
        return str(error)
    except Exception:  # the shorter program is invalid: no counterexample
        return ""
    return ""


def test_fixed_programs() -> None:
    tally = Tally()
    for number in range(FIXED):
        run(from_seed(number), tally)
    assert tally.captured > 0.9 * tally.whole, f"too few are captured: {tally}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally()
    number = SEED * PARTS + part

    @seed(number)
    @settings(
        max_examples=MANY // PARTS,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # programs are shortened by removing statements
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False, note_method_calls=False))
    def many(numbers: random.Random) -> None:
        run(generate(numbers.randrange), tally)
        if tally.programs % 250 == 0:
            with capsys.disabled():
                print(f"\n[seed {number}] {tally}", file=sys.stderr, flush=True)

    many()
    with capsys.disabled():
        print(f"\n[seed {number}] {tally}", file=sys.stderr, flush=True)
    assert tally.captured > 0.9 * tally.whole, f"too few are captured: {tally}"
