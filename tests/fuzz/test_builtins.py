"""Random programs over subclasses of builtins, objects created in the step, and global state that changes.

``make fuzz`` runs many (``FUZZ_N``, ``FUZZ_SEED``), ``make test`` a fixed few.
"""

from __future__ import annotations

import logging
import os
import random
import sys

import numpy as np
import pytest
import torch

from tests.fuzz.builtin_programs import generate
from tests.fuzz.compare import Differs
from tests.fuzz.run import check
from tests.fuzz.shrink import shrink

FIXED = 20
MANY = int(os.environ.get("FUZZ_N", "5000")) * 2 // 5
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PARTS = int(os.environ.get("FUZZ_PARTS", "1"))


def as_at_first() -> None:
    """Restores the global state that programs change."""
    np.seterr(divide="warn", over="warn", under="ignore", invalid="warn")
    np.setbufsize(8192)
    torch.set_warn_always(False)
    torch.set_default_dtype(torch.float32)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.benchmark = False
    sys.modules.pop("fuzz_module", None)


@pytest.fixture(autouse=True)
def quiet():
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
    as_at_first()


def _differs(source: str) -> str:
    as_at_first()
    try:
        check(source)
    except Differs as error:
        return str(error)
    except Exception:  # the shorter program is invalid: no counterexample
        return ""
    return ""


def run(number: int) -> bool:
    """Checks one program; fails with a shorter one that differs, as runnable source."""
    as_at_first()
    source = generate(random.Random(number).randrange)
    try:
        return check(source).replays > 0
    except Differs as error:
        said = str(error)
    shorter = shrink(source, lambda text: bool(_differs(text)), most=60)
    pytest.fail(f"seed {number}: {_differs(shorter) or said}\n{shorter}", pytrace=False)


def test_fixed_programs() -> None:
    captured = sum(run(number) for number in range(FIXED))
    assert captured > FIXED / 2, f"only {captured} of {FIXED} are captured"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    share, captured = MANY // PARTS, 0
    first = 1_000_000 * SEED + share * part
    for number in range(first, first + share):
        captured += run(number)
    with capsys.disabled():
        print(
            f"\nseeds {first} to {first + share - 1}: {share} programs agree with eager, {captured} captured",
            flush=True,
        )
