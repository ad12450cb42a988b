"""Text printed and warnings given by a step, run in three ways."""

from __future__ import annotations

import contextlib
import io
import warnings

import pytest

from tests.support.interpreter_compiled import cases, check_case


def case_warnings_ignored():
    def noisy():
        warnings.warn("careful", UserWarning, stacklevel=2)
        return 1

    def body():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return noisy()

    return body, None


def case_warnings_recorded():
    def noisy():
        warnings.warn("careful", UserWarning, stacklevel=2)
        return 1

    def body():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            noisy()
        return [(str(w.message), w.category.__name__, w.lineno > 0) for w in caught]

    return body, None


def case_warnings_as_errors():
    def body():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                warnings.warn("careful", RuntimeWarning, stacklevel=1)
            except RuntimeWarning as error:
                return str(error)

    return body, None


def case_printing_elsewhere():
    class Log:
        def __init__(self):
            self.parts = []

        def write(self, text):
            self.parts.append(text)

    log = Log()

    def body():
        print("a", 1, log.parts[:1], sep="|", file=log)
        memory = io.StringIO()
        with contextlib.redirect_stdout(memory):
            print("redirected")
        print("direct", file=memory, end="")
        return log.parts[-3:], memory.getvalue()

    return body, log


def case_printing():
    class Shown:
        def __init__(self):
            self.times = 0

        def __str__(self):
            self.times += 1
            return f"shown {self.times}"

    shown = Shown()

    def body():
        print(shown, 1, [2], sep="|", end="!\n")
        return shown.times

    return body, shown


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__.removeprefix("case_"))
def test_three_ways(case):
    check_case(case)
