"""Runs CPython's own tests with their methods interpreted, and says which fail only then.

    python tests/cpython/run.py test_generators test_with ...

Each test method is run twice: by CPython and by the interpreter over a ``DirectWorld``. Tests that CPython
itself fails or skips here are not counted. Needs a Python with its ``test`` package.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import traceback
import types
import unittest
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)
if "sidefx_train" not in sys.modules:  # the interpreter needs no torch: leave the package's own __init__ out
    package = types.ModuleType("sidefx_train")
    package.__path__ = [os.path.join(ROOT, "sidefx_train")]
    sys.modules["sidefx_train"] = package

from sidefx_train.compile.capture.interpreter import Interpreter  # noqa: E402
from sidefx_train.compile.capture.world import DirectWorld  # noqa: E402
from sidefx_train.errors import Unsupported  # noqa: E402


class _Interpreted(unittest.TestResult):
    """Keeps the tracebacks of failures."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[tuple[str, str]] = []

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self.failed.append((str(test), "".join(traceback.format_exception(*err))))

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.failed.append((str(subtest), "".join(traceback.format_exception(*err))))


def _call_interpreted(case: unittest.TestCase, method: Any) -> None:
    try:
        Interpreter(DirectWorld()).run(method)
    except Unsupported as stop:
        raise RuntimeError(f"unsupported: {stop} at {stop.location}") from stop


def _cases(suite: Any) -> list[unittest.TestCase]:
    if isinstance(suite, unittest.TestSuite):
        return [case for part in suite for case in _cases(part)]
    return [suite]


def run_module(name: str, only: str = "") -> tuple[int, list[tuple[str, str]]]:
    """Runs one module of CPython's tests; how many passed when run by CPython, and what then failed here."""
    module = importlib.import_module(f"test.{name}")
    plain = unittest.TestCase._callTestMethod
    cases = [c for c in _cases(unittest.defaultTestLoader.loadTestsFromModule(module)) if only in c.id()]
    count, failed = 0, []
    for case in cases:
        if type(case).__name__ in ("DocTestCase", "_FailedTest"):
            continue
        native = unittest.TestResult()
        unittest.TestSuite([case]).run(native)
        if not native.wasSuccessful() or native.skipped or not native.testsRun:
            continue
        count += 1
        case = type(case)(case._testMethodName)
        unittest.TestCase._callTestMethod = _call_interpreted
        result = _Interpreted()
        try:
            unittest.TestSuite([case]).run(result)
        finally:
            unittest.TestCase._callTestMethod = plain
        failed += result.failed
    return count, failed


def main(names: list[str]) -> int:
    faulthandler.enable()
    bad = 0
    for name in names:
        name, _, only = name.partition(":")
        count, failed = run_module(name, only)
        for test, trace in failed:
            print(f"--- {test}\n{trace}")
        print(f"=== {name}: {count} tests, {len(failed)} failures")
        bad += len(failed)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
