"""Lowering shared with a fork of the process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sidefx_train.compile.backend.cpp_codegen import forked_lowering
from sidefx_train.compile.backend.cpp_codegen.forked_lowering import Shared, may_fork

pytestmark = pytest.mark.skipif(not may_fork(), reason="no second processor, or no fork")


def _slowly(i: int) -> tuple[int, int]:
    time.sleep(0.05)
    return i, os.getpid()


def test_each_piece_is_done_once_and_reported_where_the_fork_did_it() -> None:
    came: list[Any] = []
    shared = Shared(6, _slowly, _slowly, came.append)
    made = shared.run()
    assert [i for i, _ in made] == list(range(6))
    elsewhere = [each for each in made if each[1] != os.getpid()]
    assert len({pid for _, pid in elsewhere}) == 1 and 1 <= len(elsewhere) < 6, made
    assert sorted(came) == elsewhere and shared.received == len(elsewhere)


def test_what_a_fork_fails_at_is_done_here() -> None:
    def fails(i: int) -> Any:
        raise ValueError(i)

    made = Shared(3, _slowly, fails, lambda made: None).run()
    assert made == [(i, os.getpid()) for i in range(3)]


def test_an_error_that_both_meet_is_raised() -> None:
    def fails(i: int) -> Any:
        if i:
            raise ValueError(f"piece {i}")
        return _slowly(i)

    with pytest.raises(ValueError, match="piece 1"):
        Shared(2, fails, fails, lambda made: None).run()


def test_a_fork_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forked_lowering, "_PATIENCE", 0.1)

    def hangs(i: int) -> Any:
        (tmp_path / "child").write_text(str(os.getpid()))
        time.sleep(60)

    assert Shared(2, _slowly, hangs, lambda made: None).run() == [(i, os.getpid()) for i in range(2)]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "child").read_text()), 0)


def test_who_forks_and_what_a_fork_sees() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(may_fork()))
    thread.start()
    thread.join()
    assert found == [False], "locks of the thread that is not forked would never be released"
    threads = torch.get_num_threads()
    seen = Shared(2, _slowly, lambda i: (may_fork(), torch.get_num_threads()), lambda made: None).run()
    assert (False, threads) in seen
