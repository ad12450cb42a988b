"""When a captured step is found to be slower than eager, and how many steps that takes."""

from __future__ import annotations

import itertools
import random

import pytest

from sidefx_train.compile.runtime.timing.paired_blocks import BLOCK, MAX_PAIRS, WARM_UP, PairedBlocks

LONGEST = WARM_UP + MAX_PAIRS * 2 * BLOCK


def decided(captured, eager, before=()):
    """Returns the decision, and the numbers of captured and eager steps; times come from functions of the step."""
    blocks, ran = PairedBlocks(before), {False: 0, True: 0}
    for step in range(LONGEST):
        kind = blocks.eager_is_next
        ran[kind] += 1
        blocks.add((eager if kind else captured)(step))
        if blocks.slower is not None:
            return blocks, ran[False], ran[True]
    raise AssertionError("not decided after the last pair")


@pytest.mark.parametrize(
    ("captured", "slower", "pairs"),
    [
        (2.0, True, 3),
        (1.3, True, 3),
        (1.1, True, 5),
        (1.04, False, 5),
        (1.0, False, 5),
        (0.95, False, 5),
        (0.5, False, 2),
    ],
)
def test_constant_times(captured, slower, pairs):
    blocks, captured_steps, eager_steps = decided(lambda step: captured, lambda step: 1.0)
    assert blocks.slower is slower
    assert (captured_steps, eager_steps) == (WARM_UP + pairs * BLOCK, pairs * BLOCK)
    assert (len(blocks.captured), len(blocks.eager)) == (pairs * (BLOCK - 1), pairs * (BLOCK - 1))


def test_first_steps_do_not_count():
    """Those of the entry, and the first of each block."""
    blocks = PairedBlocks()
    for step in range(LONGEST):
        place = (step - WARM_UP) % BLOCK
        blocks.add(100.0 * (1 + blocks.eager_is_next) if step < WARM_UP or place == 0 else 1.0)
        if blocks.slower is not None:
            break
    assert blocks.slower is False and set(blocks.captured) == set(blocks.eager) == {1.0}


def test_load_that_comes_and_goes():
    """A load during a whole pair, or during a step of each block, does not decide."""

    def loaded(step):
        pair, place = divmod(step - WARM_UP, 2 * BLOCK)
        return (3.0 if pair in (1, 2) else 1.0) * (5.0 if place % BLOCK == 2 else 1.0)

    assert decided(loaded, loaded)[0].slower is False
    assert decided(lambda step: 1.2 * loaded(step), loaded)[0].slower is True
    burst = WARM_UP + 2 * BLOCK
    assert decided(lambda step: 4.0 if burst <= step < burst + BLOCK else 1.0, lambda step: 1.0)[0].slower is False


def test_noise_is_not_slowness():
    draw = random.Random(0)
    noisy = (decided(lambda step: draw.gauss(1, 0.2), lambda step: draw.gauss(1, 0.2))[0].slower for _ in range(400))
    assert sum(noisy) < 40
    slower = (decided(lambda step: draw.gauss(2, 0.2), lambda step: draw.gauss(1, 0.2))[0].slower for _ in range(100))
    assert all(slower)


@pytest.mark.parametrize(
    ("before", "captured", "slower"),
    [
        ([9.0, 4.0, 9.0], 1.0, False),
        ([9.0, 1.5, 9.0], 1.0, None),  # a worker was compiling: eager alone may be faster
        ([9.0, 9.0], 1.0, None),
        ([9.0, 9.0, 9.0], 8.0, None),
    ],
    ids=["fastest decides", "near", "few", "slow"],
)
def test_eager_steps_before(before, captured, slower):
    """Those that ran during the compilation may save the eager blocks, for a step that is much faster."""
    blocks = PairedBlocks(before)
    for _ in itertools.repeat(None, WARM_UP + BLOCK):
        assert blocks.slower is None and not blocks.eager_is_next
        blocks.add(captured)
    assert blocks.slower is slower and blocks.eager_is_next
    assert blocks.eager == (before if slower is False else [])
