"""Which statements run natively together: the one in which a capture stops, and those next to it that gather data."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest

from sidefx_train.compile.capture.interpreter.dispatch import code_info
from sidefx_train.compile.capture.resume.statements import DataCalls, data_statement

CALLS = DataCalls(complex, frozenset({"append"}), (len,), frozenset({"append"}), lambda value: True)
ARRAYS = CALLS._replace(of_arrays=True)


def helper(value: Any) -> Any:
    return value


def gathers(batch: Any, weights: Any, n: int) -> Any:
    columns = list(zip(*batch))  # data
    mask = list(map(bool, columns))  # stop
    known = len(columns)  # data
    flat = list(weights)
    return mask, known, flat, n


def computes(batch: Any, n: int) -> Any:
    twice = len(batch) * 2
    mask = list(map(bool, batch))  # stop
    half = len(batch) / 2
    return twice, mask, half, n


def calls_the_program(batch: Any, n: int) -> Any:
    mask = list(map(helper, batch))  # refused
    return mask, n


def in_a_loop(batch: Any, n: int) -> Any:
    kept: list[Any] = []
    for each in batch:  # stop
        if each:  # stop
            kept.append(each)  # stop
    return kept, n


def in_a_loop_of_the_program(batch: Any, n: int) -> Any:
    for each in batch:
        kept = list(map(bool, each))  # stop
        helper(kept)
    return n


def in_a_condition(batch: Any, n: int) -> Any:
    if all(map(bool, batch)):  # condition
        n += 1
    return n


def in_try(batch: Any, n: int) -> Any:
    try:
        known = len(batch)  # stop
        n += known
    except ValueError:
        n = 0
    return n


def last_in_try(batch: Any, n: int) -> Any:
    try:
        n = len(batch)  # refused
    except ValueError:
        pass
    return n


def writes(self: Any, n: int) -> Any:
    self.first[n] = len(self.first)  # stop
    self.second[n] = len(self.second)  # data
    self.third[n] = n * 2
    return n


def lines(fn: Any, *marks: str) -> list[int]:
    """Returns the lines of a function that end with such a comment."""
    source, start = inspect.getsourcelines(fn)
    return [start + i for i, line in enumerate(source) if line.rstrip().endswith(tuple(f"# {mark}" for mark in marks))]


def line_of(code: types.CodeType, index: int) -> int:
    offset = code_info(code).instructions[index].offset
    return next(line or 0 for start, end, line in code.co_lines() if start <= offset < end)


def found(fn: Any, mark: str, calls: DataCalls, is_data: Callable[[str], bool]) -> set[int] | None:
    """Returns the lines that run natively if the last call in the first line with a mark stops the capture."""
    code = fn.__code__
    info, line = code_info(code), lines(fn, mark)[0]
    stops = [i for i, instr in enumerate(info.instructions) if line_of(code, i) == line and instr.name in NAMES]
    made = data_statement(code, stops[-1], 0, fn.__globals__, calls, lambda slot: is_data(info.slots[slot]))
    return None if made is None else {line_of(code, i) for i in made.body if info.instructions[i].name in NAMES}


NAMES = ("CALL", "STORE_SUBSCR", "FOR_ITER", "CALL_FUNCTION_EX")


@pytest.mark.parametrize("fn", [gathers, computes, in_a_loop_of_the_program, in_try], ids=lambda fn: fn.__name__)
def test_what_gathers_the_batch_belongs_to_it(fn: Any) -> None:
    assert found(fn, "stop", CALLS, lambda name: name in ("batch", "n")) == {*lines(fn, "stop", "data")}


def test_what_gathers_something_else_does_not() -> None:
    assert found(gathers, "stop", CALLS, lambda name: name == "n") == {
        *lines(gathers, "stop"),
        *lines(gathers, "data")[1:],
    }


def test_a_loop_over_data_is_one_statement() -> None:
    assert found(in_a_loop, "stop", CALLS, lambda name: True) == {
        lines(in_a_loop, "stop")[0],
        lines(in_a_loop, "stop")[2],
    }


def test_the_condition_of_a_branch_ends_before_it() -> None:
    assert found(in_a_condition, "condition", CALLS, lambda name: True) == {*lines(in_a_condition, "condition")}


@pytest.mark.parametrize("fn", [calls_the_program, last_in_try], ids=lambda fn: fn.__name__)
def test_no_statement(fn: Any) -> None:
    """The program's own functions are captured, and a handler that goes on at the same place binds other variables."""
    assert found(fn, "refused", CALLS, lambda name: True) is None


def test_writes_into_arrays_of_one_object() -> None:
    assert found(writes, "stop", ARRAYS, lambda name: True) == {*lines(writes, "stop", "data")}
