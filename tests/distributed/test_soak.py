"""Thousands of steps in which processes decide much alone: every state is eager's, nothing hangs, memory stays."""

from __future__ import annotations

import pytest

from tests.distributed.processes import in_two_processes
from tests.distributed.soak import OPTIONS, soak


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [0, 1], ids=["removes gradients", "keeps gradients"])
@pytest.mark.parametrize("name", OPTIONS)
def test_random_training(name, keeps):
    in_two_processes(soak, name, 2000, keeps, seconds=900)
