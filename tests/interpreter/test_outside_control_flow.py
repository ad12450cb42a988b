"""Generators, context managers, exceptions and ``match`` over objects that exist before the step, run in three ways."""

from __future__ import annotations

import collections
import contextlib

import pytest

from tests.support.interpreter_compiled import cases, check_case
from tests.support.interpreter_values import Color


def case_generator_protocol():
    log = []

    def echo():
        try:
            received = yield "first"
            while True:
                try:
                    received = yield received * 2
                except ValueError as error:
                    log.append(str(error))
                    received = -1
        finally:
            log.append("closed")

    def outer():
        result = yield from inner()
        yield ("result", result)

    def inner():
        yield 1
        return "done"

    def body():
        gen = echo()
        found = [next(gen), gen.send(3), gen.throw(ValueError("bad")), gen.send(5)]
        gen.close()
        return found, list(outer()), next(gen, "end")

    return body, log


def case_generator_over_outside_state():
    queue = collections.deque([1, 2, 3])

    def drain():
        while queue:
            yield queue.popleft()
        queue.extend([4, 5])

    def body():
        return sum(drain()), len(queue)

    return body, queue


def case_context_managers():
    log = []

    @contextlib.contextmanager
    def section(name):
        log.append(("enter", name))
        try:
            yield name.upper()
        except KeyError as error:
            log.append(("caught", repr(error)))
        finally:
            log.append(("exit", name))

    class Guard:
        depth = 0

        def __enter__(self):
            self.depth += 1
            return self

        def __exit__(self, kind, value, trace):
            log.append((kind and kind.__name__, str(value)))
            self.depth -= 1
            return kind is ValueError

    guard = Guard()

    def body():
        with section("a") as a, guard as g:
            found = [a, g.depth]
        with section("b"):
            raise KeyError("k")
        with guard:
            raise ValueError("v")
        with contextlib.suppress(ZeroDivisionError):
            1 / 0
        with contextlib.nullcontext(5) as five:
            found.append(five)
        with contextlib.ExitStack() as stack:
            stack.enter_context(section("c"))
            stack.callback(log.append, "callback")
            stack.push(guard)
            found.append(guard.depth)
        return found, guard.depth

    return body, (log, guard)


def case_exceptions_and_chaining():
    log = []

    class Problem(Exception):
        def __init__(self, code, *args):
            super().__init__(code, *args)
            self.code = code

    def risky(n):
        try:
            if n == 0:
                raise Problem(3, "text")
            return 10 // (n - 1)
        except ZeroDivisionError as error:
            raise Problem(4) from error
        else:
            log.append("else")
        finally:
            log.append(("finally", n))

    def body():
        found = []
        for n in range(3):
            try:
                found.append(risky(n))
            except Problem as problem:
                found.append((problem.code, problem.args, repr(problem.__cause__), problem.__suppress_context__))
        try:
            raise ExceptionGroup("many", [ValueError(1), TypeError(2), KeyError(3)])
        except* ValueError as group:
            found.append([repr(e) for e in group.exceptions])
        except* (TypeError, KeyError) as group:
            found.append(len(group.exceptions))
        return found

    return body, log


def case_escaping_error_inside_helpers():
    log = []

    def deep(n):
        if n == 0:
            return {}["missing"]
        try:
            return deep(n - 1)
        finally:
            log.append(n)

    def body():
        return deep(2)

    return body, log


def case_match_statement():
    class Point:
        __match_args__ = ("x", "y")

        def __init__(self, x, y):
            self.x, self.y = x, y

    log = []

    def kind(value):
        match value:
            case 0 | 1:
                return "small"
            case int(n) if n > 100:
                return f"big {n}"
            case [first, *rest]:
                return first, rest
            case {"op": op, **others}:
                log.append(op)
                return op, others
            case Point(0, y=y):
                return "axis", y
            case Point(x, y):
                return x + y
            case Color.RED:
                return "red"
            case str() as text:
                return text.upper()
            case None:
                return "none"
            case _:
                return "other"

    values = [1, 500, [1, 2, 3], {"op": "add", "n": 1}, Point(0, 4), Point(1, 2), Color.RED, "abc", None, 7.5]

    def body():
        return [kind(value) for value in values]

    return body, log


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__.removeprefix("case_"))
def test_three_ways(case):
    check_case(case)
