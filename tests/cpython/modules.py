"""Runs the tests of one of CPython's test modules twice: in CPython, then interpreted.

A *case* is one test method, or one example of a doctest. Cases that CPython itself fails or skips here are not
counted, because they show nothing about the interpreter.
"""

from __future__ import annotations

import builtins
import doctest
import importlib
import io
import os
import random
import re
import sys
import traceback
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
if "sidefx_train" not in sys.modules:  # the interpreter needs no torch: leave the package's own __init__ out
    package = types.ModuleType("sidefx_train")
    package.__path__ = [os.path.join(ROOT, "sidefx_train")]
    sys.modules["sidefx_train"] = package

from sidefx_train.compile.capture.interpreter.interpreter import Interpreter  # noqa: E402
from sidefx_train.compile.capture.interpreter.world import DirectWorld  # noqa: E402
from sidefx_train.errors import Unsupported  # noqa: E402

Failures = dict[str, str]
"""Names of failed cases with their tracebacks."""


def run_module(name: str, only: str = "") -> tuple[list[str], Failures, list[str]]:
    """Runs one module of CPython's tests.

    Args:
        name: the module's name in the ``test`` package.
        only: a substring of the names of the cases to run; all, if empty.

    Returns:
        The cases that CPython passes, those of them that fail when interpreted, and the cases that CPython fails or
        skips here.
    """
    module = importlib.import_module(f"test.{name}")
    passed: list[str] = []
    failures: Failures = {}
    left: list[str] = []
    for test in _flat(unittest.defaultTestLoader.loadTestsFromModule(module)):
        if type(test).__name__ == "_FailedTest":
            raise ImportError(str(getattr(test, "_exception", test)))
        label = _label(test)
        if isinstance(test, doctest.DocTestCase):
            if only in label:
                _run_doctest(label, test, passed, failures, left)
        elif only in label:
            _run_method(label, test, passed, failures, left)
    return passed, failures, left


def _flat(suite: Any) -> Iterator[unittest.TestCase]:
    if isinstance(suite, unittest.TestSuite):
        for part in suite:
            yield from _flat(part)
    else:
        yield suite


def _label(test: unittest.TestCase) -> str:
    parts = test.id().split(".")
    return ".".join(parts[2:]) if parts[0] == "test" else test.id()


def _interpreted(call: Callable[[Interpreter], Any]) -> Any:
    try:
        return call(Interpreter(DirectWorld()))
    except Unsupported as stop:
        raise RuntimeError(f"unsupported: {stop} at {stop.location}") from stop


# --- test methods ------------------------------------------------------------------------------------------------


class _Tracebacks(unittest.TestResult):
    """Keeps the tracebacks of failures and of failed subtests."""

    def __init__(self) -> None:
        super().__init__()
        self.traces: list[str] = []

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self.traces.append("".join(traceback.format_exception(*err)))

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.traces.append(f"{subtest}\n" + "".join(traceback.format_exception(*err)))


def _run_method(label: str, case: unittest.TestCase, passed: list[str], failures: Failures, left: list[str]) -> None:
    random.seed(1)
    native = unittest.TestResult()
    unittest.TestSuite([case]).run(native)
    if not native.wasSuccessful() or native.skipped or not native.testsRun:
        left.append(label)
        return
    passed.append(label)
    random.seed(1)
    re.purge()  # a pattern compiled a second time warns a second time
    builtins_before = dict(vars(builtins))
    case = type(case)(case._testMethodName)
    plain = unittest.TestCase._callTestMethod  # type: ignore[attr-defined]

    def call_interpreted(case: unittest.TestCase, method: Callable[[], Any]) -> None:
        _interpreted(lambda interp: interp.run(method))

    unittest.TestCase._callTestMethod = call_interpreted  # type: ignore[attr-defined]
    result = _Tracebacks()
    try:
        unittest.TestSuite([case]).run(result)
    finally:
        unittest.TestCase._callTestMethod = plain  # type: ignore[attr-defined]
        vars(builtins).update(builtins_before)  # some tests replace them
    if result.traces:
        failures[label] = "\n".join(result.traces)
    elif result.unexpectedSuccesses:
        failures[label] = "was expected to fail"


# --- doctests ----------------------------------------------------------------------------------------------------


class _Examples(doctest.DocTestRunner):
    """Records which examples failed, by their line."""

    def __init__(self, flags: int) -> None:
        super().__init__(optionflags=flags, verbose=False)
        self.failed: dict[int, str] = {}

    def report_failure(self, out: Any, test: Any, example: Any, got: str) -> None:
        self.failed[example.lineno] = f"{example.source}expected:\n{example.want}got:\n{got}"

    def report_unexpected_exception(self, out: Any, test: Any, example: Any, exc_info: Any) -> None:
        self.failed[example.lineno] = example.source + "".join(traceback.format_exception(*exc_info))


def _run_doctest(label: str, case: Any, passed: list[str], failures: Failures, left: list[str]) -> None:
    test = case._dt_test
    runs = []
    for execute in (exec, None):
        runner = _Examples(case._dt_optionflags)
        copied = doctest.DocTest(
            test.examples, test.globs, test.name, test.filename, test.lineno, test.docstring
        )  # fmt: skip
        interp = Interpreter(DirectWorld())
        # A module's own name hides the builtin: doctest's ``exec(code, globs)`` then calls this function.
        doctest.exec = execute or (lambda code, globs: interp.run(exec, (code, globs)))  # type: ignore[attr-defined]
        try:
            runner.run(copied, out=io.StringIO().write)
        finally:
            del doctest.exec  # type: ignore[attr-defined]
        runs.append(runner.failed)
    native, interpreted = runs
    for example in test.examples:
        name = f"{label}:{example.lineno}"
        if example.lineno in native or example.options.get(doctest.SKIP):
            left.append(name)
            continue
        passed.append(name)
        if example.lineno in interpreted:
            failures[name] = interpreted[example.lineno]
