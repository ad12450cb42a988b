"""The third way to run the interpreter tests' bodies: with shadows, in a captured step with a tensor operation.

A *body* builds all it needs and so can only show its result, exception and printed text. A *case* is a factory: it
makes outside state, and returns a body over it together with the objects to watch; its effects are compared after
every call.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sidefx_train
from sidefx_train.compile.capture.interpreter.interpreter import Interpreter
from sidefx_train.compile.capture.interpreter.world import DirectWorld
from sidefx_train.errors import GraphBreakError
from tests.support.parity import photograph

CALLS = 3

Body = Callable[[], Any]
Case = Callable[[], tuple[Body, Any]]
Way = Callable[[Body], Callable[[], Any]]


def plainly(body: Body) -> Callable[[], Any]:
    return lambda: body()


def interpreted(body: Body) -> Callable[[], Any]:
    return lambda: Interpreter(DirectWorld()).run(body)


def compiled(body: Body) -> Callable[[], Any]:
    """Returns a captured step that runs ``body`` and a tensor operation; nothing may fall back to eager Python."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        y = x * 2
        value = body()
        return y + 1, value

    captured = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise")

    def call() -> Any:
        result, value = captured(torch.ones(3))
        assert torch.equal(result, torch.full((3,), 3.0)), "the tensor operation around the body"
        report = sidefx_train.explain(captured)
        assert report.fallback_count == 0 and not report.breaks, f"ran eagerly:\n{report}"
        return value

    return call


def catching(body: Body) -> Body:
    """Wraps ``body`` to return its exception as a value: type, message, causes, and the lines of the traceback."""

    def caught() -> Any:
        try:
            return body()
        except Exception as error:
            return described(error)

    def described(error: BaseException | None) -> Any:
        if error is None:
            return None
        lines = []
        trace = error.__traceback__
        while trace is not None:
            lines.append((trace.tb_frame.f_code.co_name, trace.tb_lineno))
            trace = trace.tb_next
        if lines and lines[0][0] == "caught":
            lines = lines[1:]
        notes = getattr(error, "__notes__", None)
        return (
            type(error).__name__,
            str(error),
            lines,
            notes,
            error.__suppress_context__,
            described(error.__cause__),
            described(error.__context__),
        )

    return caught


def history(case: Case, way: Way) -> list[Any]:
    """Returns the result or exception, printed text and watched state of every call of a case."""
    body, watched = case()
    call = way(catching(body))
    moments = []
    for _ in range(CALLS):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = call()
        moments.append((photograph(value), printed.getvalue(), photograph(watched)))
    return moments


def check_case(case: Case, ways: tuple[Way, ...] = (interpreted, compiled)) -> None:
    """Fails unless all ways agree with CPython about every call of a case."""
    wanted = history(case, plainly)
    for way in ways:
        found = history(case, way)
        for index, (want, have) in enumerate(zip(wanted, found, strict=True)):
            for what, a, b in zip(("result", "print", "effects"), want, have, strict=True):
                assert b == a, f"{way.__name__}, call {index}: {what} {b!r}, should be {a!r}"


def check_compiled(body: Body) -> None:
    """Fails unless a captured step agrees with CPython about ``body``."""
    check_case(lambda: (body, None), (compiled,))


def check_refused(case: Case, code: str) -> None:
    """Fails unless capture of a case is refused with ``code``, and the case then runs as in CPython."""
    check_case(case, (interpreted,))
    body, _ = case()
    with pytest.raises(GraphBreakError) as refusal:
        compiled(body)()
    assert refusal.value.code == code, f"refused with {refusal.value.code}, should be {code}"

    def eagerly(body: Body) -> Callable[[], Any]:
        step = sidefx_train.compile(lambda x: (x + 1, body()), backend="eager")
        return lambda: step(torch.ones(3))[1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_case(case, (eagerly,))


def cases(namespace: dict[str, Any], prefix: str = "case_") -> list[Any]:
    """Returns the functions of a test module whose names start with ``prefix``."""
    return [value for name, value in namespace.items() if name.startswith(prefix)]
