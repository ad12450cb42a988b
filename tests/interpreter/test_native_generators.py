"""Interpreted generators that continue as native ones, from every point where they may be suspended."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from typing import Any

import pytest

from sidefx_train.compile.capture.interpreter.interpreter import Interpreter
from sidefx_train.compile.capture.interpreter.world import DirectWorld
from sidefx_train.compile.capture.resume.native_generators import hand_out, resume
from sidefx_train.errors import Unsupported

Log = list[Any]


def counting(log: Log) -> Generator[Any, Any, Any]:
    total = 0
    for i in range(3):
        got = yield i * 10 + total
        log.append(("got", got))
        total += got or 1
    return total


def guarded(log: Log) -> Generator[Any, Any, Any]:
    log.append("enter")
    try:
        got = yield "in"
        log.append(("body", got))
        yield "still in"
    except ValueError as error:
        log.append(("caught", repr(error), repr(sys.exc_info()[1])))
        yield "handled"
        log.append(repr(sys.exc_info()[1]))
        raise
    finally:
        log.append(("finally", repr(sys.exc_info()[1])))


def handling(log: Log) -> Generator[Any, Any, Any]:
    try:
        [][1]
    except IndexError as error:
        yield repr(sys.exc_info()[1])
        log.append(error.args)
        try:
            yield 2
        finally:
            log.append(repr(sys.exc_info()[1]))
    yield repr(sys.exc_info()[1])


def with_cells(log: Log) -> Generator[Any, Any, Any]:
    count = 0

    def more() -> int:
        nonlocal count
        count += 1
        return count

    values = [more(), (yield more), more()]
    with contextlib.suppress(KeyError):
        yield values
        raise KeyError(count)
    yield sum(values[::2]) + count


class Base:
    def rounds(self, log: Log) -> Generator[Any, Any, Any]:
        yield "base"


class Derived(Base):
    def rounds(self, log: Log) -> Generator[Any, Any, Any]:
        yield type(self).__name__
        for item in super().rounds(log):
            yield item
        raise StopIteration("turned into an error")


def derived(log: Log) -> Generator[Any, Any, Any]:
    return Derived().rounds(log)


def delegating(log: Log) -> Generator[Any, Any, Any]:
    yield "before"
    got = yield from counting(log)
    yield ("after", got)


def delegating_deeply(log: Log) -> Generator[Any, Any, Any]:
    try:
        log.append((yield from delegating(log)))
        yield from [7, 8]
    except KeyError as error:
        log.append(repr(error))
        yield from guarded(log)
    finally:
        log.append("left")


ACTIONS: dict[str, list[tuple[str, Any]]] = {
    "next": [("send", None)] * 6,
    "send": [("send", None), ("send", 3), ("send", 4), ("send", 5), ("send", 6)],
    "throw": [("send", None), ("throw", ValueError("v")), ("send", None), ("send", None)],
    "throw later": [("send", None), ("send", 2), ("throw", ValueError("v")), ("throw", KeyError("k"))],
    "close": [("send", None), ("send", 1), ("close", None), ("send", None)],
}


def act(generator: Any, action: str, value: Any) -> Any:
    try:
        if action == "close":
            return generator.close()
        return getattr(generator, action)(value)
    except BaseException as error:
        return type(error), error.args, repr(error.__context__)


@pytest.mark.parametrize("actions", ACTIONS.values(), ids=ACTIONS)
@pytest.mark.parametrize(
    "body", [counting, guarded, handling, with_cells, derived, delegating, delegating_deeply], ids=lambda f: f.__name__
)
def test_goes_on_natively(body: Any, actions: list[tuple[str, Any]]) -> None:
    wanted_log: Log = []
    plain = body(wanted_log)
    wanted = [act(plain, *action) for action in actions]
    handed_out = 0
    for done in range(len(actions)):
        log: Log = []
        generator = Interpreter(DirectWorld()).run(body, (log,))
        found = [act(generator, *action) for action in actions[:done]]
        try:
            code, state = hand_out(generator)
        except Unsupported:
            assert generator.frame.done, f"refused after {done}"
            continue
        handed_out += 1
        space = generator.frame.globals
        real = resume(code, space, generator.__name__, generator.__qualname__, generator.started, state)
        assert (real.__name__, real.__qualname__) == (plain.__name__, plain.__qualname__)
        found += [act(real, *action) for action in actions[done:]]
        assert [shown(item) for item in found] == [shown(item) for item in wanted], f"handed out after {done}"
        assert log == wanted_log, f"handed out after {done}"
    assert handed_out >= 2


def shown(item: Any) -> Any:
    return item.__name__ if callable(item) and not isinstance(item, type) else item
