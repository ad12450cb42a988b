"""Call stacks: log records, tracebacks and stack traversals show the step's own frames, as in eager."""

from __future__ import annotations

import inspect
import io
import logging
import os
import sys
import traceback
import warnings
from typing import Any

import pytest
import torch
from rich.console import Console

import sidefx_train
from sidefx_train.errors import SideFXWarning

PACKAGE = os.path.dirname(sidefx_train.__file__) + os.sep
log = logging.getLogger(__name__)


def _own(file: str) -> bool:
    return file.startswith((PACKAGE, "<sidefx_train"))


def _compiled(step: Any) -> Any:
    return sidefx_train.compile(step, backend="eager")


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        yield


# --- log records -------------------------------------------------------------------------------------------------


def _tells(n):
    log.warning("n is %d", n)
    log.warning("for my caller: %d", n, stacklevel=2)


def test_log_records_name_the_line_that_made_them() -> None:
    def step(x, n):
        _tells(n)
        os.times()
        _tells(n + 1)
        logging.getLogger(__name__).error("the end")
        return x + n

    def records(run, n):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(filename)s:%(lineno)d %(funcName)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        try:
            run(torch.ones(2), n)
        finally:
            log.removeHandler(handler)
        return stream.getvalue()

    compiled = _compiled(step)
    for n in (1, 1, 2, 3):
        want = records(step, n)
        assert "test_stack_frames.py" in want and "_tells" in want
        assert records(compiled, n) == want
    assert compiled.report().replays == 4


# --- tracebacks --------------------------------------------------------------------------------------------------


def _checks(n):
    os.times()
    if n > 2:
        raise ValueError(f"{n} is too big")


def _inner(x, n):
    y = x * 2
    _checks(n)
    return y


def _outer(x, n):
    return _inner(x, n) + 1


def _entries(trace: Any) -> list[tuple[str, int]]:
    return [(frame.f_code.co_name, line) for frame, line in traceback.walk_tb(trace)]


def test_the_log_of_a_console_names_the_line() -> None:
    def step(x, console):
        console.log("loss", x.sum().item())
        console.print("between")
        console.log(f"[b]{x.sum().item():.1f}[/b]")
        return x + 1

    def shown(run):
        console = Console(file=io.StringIO(), width=70, log_time=False)
        for number in range(3):
            run(torch.full((2,), float(number)), console)
        return console.file.getvalue()

    compiled = _compiled(step)
    assert shown(compiled) == shown(step)
    assert not compiled.report().breaks


def test_an_error_behind_a_break_leads_through_the_steps_frames() -> None:
    compiled = _compiled(_outer)
    for n in (1, 2, 3, 4):
        found = []
        for run in (_outer, compiled):
            try:
                run(torch.ones(2), n)
            except ValueError as error:
                found.append(_entries(error.__traceback__)[1:])
        assert not found or found[0] == found[1]
        assert bool(found) == (n > 2)


def test_a_handler_in_the_step_sees_the_steps_frames() -> None:
    def step(x, n):
        try:
            return _outer(x, n), None
        except ValueError as error:
            return x, [(f.f_code.co_name, line) for f, line in traceback.walk_tb(error.__traceback__)]

    compiled = _compiled(step)
    for n in (1, 3, 3, 2, 4):
        (x, want), (y, got) = step(torch.ones(2), n), compiled(torch.ones(2), n)
        assert torch.equal(x, y) and got == want


def test_an_error_in_a_captured_step_is_the_programs() -> None:
    def step(x, n):
        return torch.cat([x, x]).view(n)

    compiled = _compiled(step)
    compiled(torch.ones(2), 4)
    with pytest.raises(RuntimeError) as raised:
        compiled(torch.ones(2), 3)
    assert [frame.f_code.co_name for frame, _ in traceback.walk_tb(raised.tb)][1:] == ["step"]


def test_an_error_of_the_library_keeps_its_frames() -> None:
    def step(x):
        os.times()
        return x

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    with pytest.raises(sidefx_train.errors.GraphBreakError) as raised:
        compiled(torch.ones(2))
    assert any(_own(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(raised.tb))


# --- stack traversal ---------------------------------------------------------------------------------------------


def _names(frame: Any) -> list[tuple[str, int]]:
    found = []
    while frame is not None:
        if not _own(frame.f_code.co_filename):
            found.append((frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return found


def _caller() -> str:
    return sys._getframe(1).f_code.co_name


def _walks(x):
    found = _names(sys._getframe())
    return x + len(found), found


def _walks_further_in(x):
    y, found = _walks(x * 2)
    return y, found, _caller()


def _walks_behind_a_break(x):
    y = x * 2
    os.times()
    found = _names(sys._getframe())
    return y, found, _caller()


def _inspects(x):
    return x, [frame.function for frame in inspect.stack() if not _own(frame.filename)], _caller()


@pytest.mark.parametrize("step", [_walks, _walks_further_in, _walks_behind_a_break, _inspects])
def test_the_stack_of_a_step(step: Any) -> None:
    """Between the frames of the step and of its caller are only the library's own frames."""
    compiled = _compiled(step)
    for _ in range(3):
        got, want = [run(torch.ones(2)) for run in (compiled, step)]
        assert torch.equal(got[0], want[0]) and str(got[1:]) == str(want[1:])


def _chain(frame: Any, until: Any) -> list[tuple[str, str, int]]:
    found = []
    while True:
        found.append((frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        if frame.f_code.co_name == until:
            return found
        frame = frame.f_back


def _notes(log: list[Any]) -> None:
    os.times()
    log.append(_chain(sys._getframe(1), "_called_over_breaks"))
    warnings.warn("of the caller", UserWarning, stacklevel=2)


def _further_in(x, log):
    y = x * 2
    for _ in range(2):
        _notes(log)
        y = y + 1
    try:
        _stops(log)
    except StopIteration as stop:
        log.append((stop.value, [f.name for f in traceback.extract_tb(stop.__traceback__) if not _own(f.filename)]))
    return y


def _stops(log):
    os.times()
    log.append(len(log))
    if len(log) > 2:
        _raises(log)


def _raises(log):
    os.times()
    raise StopIteration(len(log))


def _called_over_breaks(x):
    log: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = _further_in(x, log) + 1
        _notes(log)
    return y, log, [(w.filename, w.lineno) for w in caught if "of the caller" in str(w.message)]


def test_frames_behind_breaks_stand_right_above_their_callers():
    """No frame of the library is between two of the program's."""
    compiled = _compiled(_called_over_breaks)
    for _ in range(3):
        got, want = [run(torch.ones(2)) for run in (compiled, _called_over_breaks)]
        assert torch.equal(got[0], want[0]) and got[1:] == want[1:]
    assert compiled.report().breaks and not compiled.report().fallbacks


FACTOR = 1


def _of_my_caller(frame):
    return frame.f_globals["FACTOR"], frame.f_lineno, sorted(frame.f_locals), frame.f_lasti > 0


def test_frames_of_the_step_alone_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x):
        frame = sys._getframe()
        first = _of_my_caller(frame)
        assert frame.f_code is step.__code__
        local = frame.f_locals
        return x * 2, _caller(), first, local["x"] is x, _of_my_caller(frame), sys._getframe().f_globals is globals()

    compiled = _compiled(step)
    for factor in (1, 1, 2):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        assert str(compiled(torch.ones(2))) == str(step(torch.ones(2)))
    assert compiled.report().replays == 3 and not compiled.report().breaks
