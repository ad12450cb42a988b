"""The interpreter's tests need no torch: without it only they run, which is how other Python versions are checked."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types

if importlib.util.find_spec("torch") is None:
    _root = pathlib.Path(__file__).parents[2]
    _package = types.ModuleType("sidefx_train")
    _package.__path__ = [str(_root / "sidefx_train")]
    sys.modules["sidefx_train"] = _package
    collect_ignore = [
        file.name
        for file in pathlib.Path(__file__).parent.glob("test_*.py")
        if "tests.support.interpreter_compiled" in file.read_text()
    ]
