"""Caches private to a test: without compiled graphs of other tests, but with files that are built once per machine.

These files are native modules and precompiled headers. Without them, each test and each process that it starts would
build them again, and headers would be precompiled in the background on the cores that the next tests use.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from sidefx_train import disk_cache
from sidefx_train.compile.native import build

_MACHINE = disk_cache.machine_dir()


def new_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes ``folder`` the cache from now on; compiled entries that it already has are kept."""
    native = _native(monkeypatch)
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(folder))
    own = disk_cache.machine_dir()
    if not (own / "headers").exists():
        (own / "headers").symlink_to(_MACHINE / "headers")
        for key, library, label in native:
            name = disk_cache.add_library(library, machine=True)
            assert disk_cache.store("native", key, {"library": name}, label, machine=True)
    return own


@lru_cache(maxsize=1)
def _native_modules() -> tuple[tuple[str, Path, str], ...]:
    """Returns key, file and label of each native module, built if missing; none if nothing can be built."""
    found = []
    for module in (build._PRODUCTS, build._ROWS, build._LSTM, build._ATTENTION, build._AROUND, build._GUARDS):
        key = build._key(module)
        if disk_cache.load("native", key, machine=True) is None:
            build._load(module)
        known = disk_cache.load("native", key, machine=True)
        library = None if known is None else disk_cache.library(known["library"], machine=True)
        if library is not None:
            found.append((key, library, module.label))
    return tuple(found)


def _native(monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[str, Path, str], ...]:
    with monkeypatch.context() as usual:
        usual.setattr(disk_cache, "machine_dir", lambda: _MACHINE)
        (_MACHINE / "headers").mkdir(exist_ok=True)
        return _native_modules()
