"""``with`` and context managers: the interpreter agrees with CPython."""

from __future__ import annotations

import contextlib

import pytest

from tests.support.interpreter import bodies, check


class Manager:
    def __init__(self, log, name="m", swallow=False):
        self.log, self.name, self.swallow = log, name, swallow

    def __enter__(self):
        self.log.append(f"enter {self.name}")
        return self

    def __exit__(self, kind, value, trace):
        self.log.append((f"exit {self.name}", kind and kind.__name__, str(value), trace is not None))
        return self.swallow


def body_with():
    log = []
    with Manager(log) as m:
        log.append(m.name)
    return log


def body_with_exception():
    log = []
    try:
        with Manager(log):
            raise ValueError("in")
    except ValueError:
        log.append("out")
    return log


def body_with_swallow():
    log = []
    with Manager(log, swallow=True):
        raise ValueError("in")
    return log


def body_with_several():
    log = []
    with Manager(log, "a") as a, Manager(log, "b", swallow=True) as b:
        log.append((a.name, b.name))
        raise KeyError("k")
    return log


def body_with_return_and_break():
    log = []

    def f():
        for i in range(3):
            with Manager(log, i):
                if i == 0:
                    continue
                if i == 1:
                    break
        with Manager(log, "r"):
            return "value"

    return f(), log


def body_with_exit_raises():
    class Bad:
        def __enter__(self):
            return self

        def __exit__(self, *a):
            raise KeyError("exit")

    with Bad():
        raise ValueError("body")


def body_with_missing_exit():
    class Half:
        def __enter__(self): ...

    with Half():
        pass


def body_with_not_a_manager():
    with 3:
        pass


def body_contextmanager():
    log = []

    @contextlib.contextmanager
    def cm(x):
        log.append(f"in {x}")
        try:
            yield x * 2
        except ValueError as e:
            log.append(f"caught {e}")
        finally:
            log.append("out")

    with cm(3) as v:
        log.append(v)
    with cm(4):
        raise ValueError("v")
    return log


def body_contextmanager_lets_through():
    @contextlib.contextmanager
    def cm():
        yield

    with cm():
        raise KeyError("through")


def body_contextmanager_stop_iteration():
    @contextlib.contextmanager
    def cm():
        yield

    with cm():
        raise StopIteration("odd")


def body_contextmanager_as_decorator():
    log = []

    @contextlib.contextmanager
    def cm():
        log.append("in")
        yield
        log.append("out")

    @cm()
    def f():
        log.append("body")
        return 1

    return f(), f(), log


def body_exit_stack():
    log = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(Manager(log, "a"))
        stack.callback(log.append, "callback")
        stack.push(lambda *a: log.append("pushed"))
        stack.enter_context(Manager(log, "b"))
    return log


def body_exit_stack_exception():
    log = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(Manager(log, "a", swallow=True))
        stack.enter_context(Manager(log, "b"))
        raise ValueError("x")
    return log


def body_suppress_closing_null():
    log = []
    with contextlib.suppress(KeyError):
        {}["a"]

    class C:
        def close(self):
            log.append("closed")

    with contextlib.closing(C()), contextlib.nullcontext(5) as n:
        log.append(n)
    return log


def body_context_decorator_class():
    log = []

    class C(contextlib.ContextDecorator):
        def __enter__(self):
            log.append("in")

        def __exit__(self, *a):
            log.append("out")

    @C()
    def f(x):
        return x + 1

    return f(1), log


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
