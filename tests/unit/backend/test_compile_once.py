"""A graph that several processes need is lowered by one of them; whatever becomes of it, the others go on."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager

import pytest
import torch

import sidefx_train
from sidefx_train.compile.backend.compile_once import compiling, is_marked, mark_made
from sidefx_train.compile.common import process_locks

GRAPH = "00000000000000ab" + 24 * "0"
OTHER = "00000000000000ff" + 24 * "0"

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX locks")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))


@contextmanager
def another_process(lowers):
    """A process that lowers a graph, from when this context is entered on."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with compiling(GRAPH, lambda: is_marked(GRAPH)):
                os.write(theirs, b".")
                lowers()
        finally:
            os._exit(0)
    os.read(ours, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours), os.close(theirs)


def marks():
    time.sleep(0.2)
    mark_made(GRAPH)


def test_others_find_what_one_has_lowered():
    with another_process(marks), compiling(GRAPH, lambda: is_marked(GRAPH)) as found:
        assert found and is_marked(GRAPH)


def test_processes_that_find_it_do_not_wait_for_each_other():
    mark_made(GRAPH)
    with another_process(lambda: time.sleep(30)), compiling(GRAPH, lambda: is_marked(GRAPH)) as found:
        assert found


def test_the_lock_of_one_graph_survives_that_of_another():
    def lowers_another():
        with compiling(OTHER, lambda: False):
            pass
        os.write(theirs, b".")
        marks()

    ours, theirs = os.pipe()
    with another_process(lowers_another):
        os.read(ours, 1)
        with compiling(GRAPH, lambda: is_marked(GRAPH)) as found:
            assert found
    os.close(ours), os.close(theirs)


def test_a_killed_process_leaves_no_lock():
    with another_process(lambda: time.sleep(30)) as child:
        os.kill(child, signal.SIGKILL)
        with compiling(GRAPH, lambda: is_marked(GRAPH)) as found:
            assert not found


def test_patience_ends(monkeypatch):
    monkeypatch.setattr(process_locks, "PATIENCE", 0.1)
    with another_process(lambda: time.sleep(30)), compiling(GRAPH, lambda: is_marked(GRAPH)) as found:
        assert not found


def test_other_graphs_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(process_locks, "PATIENCE", 20.0)
    began = time.monotonic()
    with another_process(lambda: time.sleep(30)), compiling(OTHER, lambda: False):
        assert time.monotonic() - began < 10


def test_a_folder_without_locks_is_no_obstacle(monkeypatch):
    def refuses(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(process_locks.fcntl, "lockf", refuses)
    with compiling(GRAPH, lambda: False) as found:
        assert not found


def test_a_step_takes_what_another_process_has_lowered_meanwhile(monkeypatch):
    """The cache has nothing when the step looks, and has the graph when the lock is free."""
    first = sidefx_train.compile(lambda x: x.sin() + 1)
    x = torch.randn(5)
    expected = first(x)
    from sidefx_train.compile.backend import inductor

    looked = []

    def later(key, traced, load):
        looked.append(key)
        return None if len(looked) == 1 else find(key, traced, load)

    find = inductor.find
    monkeypatch.setattr(inductor, "find", later)
    asked = iter([False, True])
    monkeypatch.setattr(inductor, "is_kept", lambda key: next(asked))
    second = sidefx_train.compile(lambda x: x.sin() + 1)
    assert torch.equal(second(x), expected)
    assert len(looked) == 2 and "compiled graph from the cache" in second.report().details()
