"""Imports that a capture needs, made early."""

from __future__ import annotations

import importlib
import multiprocessing
import threading
from functools import cache


@cache
def _load_submodule(name: str) -> None:
    """Imports a module on a thread of its own: it keeps frames of its import, and with them those of all callers."""
    loading = threading.Thread(target=importlib.import_module, args=(name,), daemon=True)
    loading.start()
    loading.join()


NEEDED = "torch._dynamo"
"""Module that captures need."""


def import_what_captures_need() -> None:
    """Imports what is ``NEEDED``, which the first table of symbols does, and eager's first optimizer as well.

    Processes that this one starts, such as the workers of a data loader, import this library for its names alone.
    """
    if multiprocessing.parent_process() is None:
        _load_submodule(NEEDED)
