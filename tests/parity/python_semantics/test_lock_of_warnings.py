"""A capture that stops within ``warnings.catch_warnings`` leaves the lock of ``warnings`` free for other threads."""

from __future__ import annotations

import threading
import warnings

import torch

import sidefx_train


class Stopping(list):
    """A list of filters whose copy is not captured."""

    def __getitem__(self, key):
        threading.get_native_id()
        return super().__getitem__(key)


def test_other_threads_can_warn(monkeypatch):
    def step(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return x * 2

    monkeypatch.setattr(warnings, "filters", Stopping(warnings.filters))
    sidefx_train.compile(step, backend="eager")(torch.ones(2))
    ended = threading.Event()

    def warn():
        warnings.warn("of another thread", stacklevel=1)
        ended.set()

    thread = threading.Thread(target=warn, daemon=True)
    thread.start()
    assert ended.wait(20)
