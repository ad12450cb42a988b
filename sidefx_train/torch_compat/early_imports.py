"""Imports that a capture needs, made early."""

from __future__ import annotations

import importlib
import multiprocessing
import threading
from functools import cache


@cache
def _load_submodule(name: str) -> None:
    """Imports a module on a separate thread: it keeps the frames of its import, and so those of all callers, alive.

    Raises what the import raises.
    """
    failed: list[Exception] = []

    def load() -> None:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed.append(error)

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    loading.join()
    if failed:
        raise failed[0]


NEEDED = "torch._dynamo"
"""Module that captures need."""


def import_what_captures_need() -> None:
    """Imports ``NEEDED``, which the first symbol table imports, and eager's first optimizer too.

    Processes started by this one, such as data loader workers, import this library only for its names.
    """
    if multiprocessing.parent_process() is None:
        _load_submodule(NEEDED)
