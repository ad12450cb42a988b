"""Generators: the interpreter agrees with CPython."""

from __future__ import annotations

import itertools
import sys

import pytest

from tests.support.interpreter import bodies, check


def body_generator_basic():
    def g(n):
        for i in range(n):
            yield i

    return list(g(3)), sum(g(4)), [*g(2)], dict(zip("ab", g(2))), max(g(5))


def body_generator_send():
    def g():
        total = 0
        while True:
            got = yield total
            if got is None:
                return "done"
            total += got

    it = g()
    out = [next(it), it.send(5), it.send(7)]
    try:
        it.send(None)
    except StopIteration as e:
        out.append(e.value)
    return out


def body_generator_send_too_early():
    def g():
        yield 1

    g().send(3)


def body_generator_throw():
    log = []

    def g():
        while True:
            try:
                yield len(log)
            except ValueError as e:
                log.append(str(e))

    it = g()
    next(it)
    return it.throw(ValueError("a")), it.throw(ValueError, "b"), log


def body_generator_throw_uncaught():
    def g():
        yield 1

    it = g()
    next(it)
    it.throw(KeyError("boom"))


def body_generator_throw_unstarted():
    def g():
        yield 1

    it = g()
    try:
        it.throw(ValueError("x"))
    except ValueError as e:
        return str(e), list(it)


def body_generator_close():
    log = []

    def g():
        try:
            yield 1
        except GeneratorExit:
            log.append("exit")
            raise
        finally:
            log.append("finally")

    it = g()
    next(it)
    it.close()
    it.close()
    return log, list(it)


def body_generator_ignores_close():
    def g():
        try:
            yield 1
        except GeneratorExit:
            yield 2

    it = g()
    next(it)
    it.close()


def body_generator_dropped():
    log = []

    def g():
        try:
            yield 1
        finally:
            log.append("finally")

    for _ in g():
        break
    it = g()
    next(it)
    del it
    return log


def body_generator_raises():
    def g():
        yield 1
        raise ValueError("inside")

    list(g())


def body_generator_raises_stop_iteration():
    def g():
        yield 1
        raise StopIteration("x")

    list(g())


def body_generator_reentered():
    def g():
        yield next(it)

    it = g()
    next(it)


def body_yield_from():
    def inner():
        x = yield 1
        y = yield x + 1
        return x + y

    def outer():
        result = yield from inner()
        yield ("result", result)
        yield from [7, 8]
        yield from "ab"

    it = outer()
    return next(it), it.send(10), it.send(20), list(it)


def body_yield_from_throw():
    def inner():
        try:
            yield 1
        except ValueError:
            yield "caught"
        return "end"

    def outer():
        yield (yield from inner())

    it = outer()
    next(it)
    return it.throw(ValueError), next(it)


def body_yield_from_close():
    log = []

    def inner():
        try:
            yield 1
        finally:
            log.append("inner")

    def outer():
        try:
            yield from inner()
        finally:
            log.append("outer")

    it = outer()
    next(it)
    it.close()
    return log


def body_yield_from_deep():
    def tree(n):
        if n:
            yield from tree(n - 1)
            yield n
            yield from tree(n - 1)

    return list(tree(4))


def body_yield_from_iterator_class():
    class It:
        def __init__(self):
            self.n = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.n += 1
            if self.n > 2:
                raise StopIteration("value")
            return self.n

        def send(self, v):
            return ("sent", v)

    def g():
        return (yield from It())

    it = g()
    out = [next(it), it.send(9), next(it)]
    try:
        next(it)
    except StopIteration as e:
        out.append(e.value)
    return out


def body_generator_expression():
    n = 3
    g = (i * n for i in range(4) if i % 2)
    n = 10
    return list(g), sum(x for x in [1, 2]), set(a + b for a in "ab" for b in "cd")


def body_generator_expression_first_iterable_now():
    def boom():
        raise ValueError("now")

    (x for x in boom())


def body_generator_with_finally_and_return():
    def g():
        try:
            yield 1
            return 2
        finally:
            yield 3

    return list(g())


def body_generator_exc_info():
    def g():
        yield sys.exc_info()[0]
        try:
            raise KeyError
        except KeyError:
            yield sys.exc_info()[0].__name__
        yield sys.exc_info()[0]

    it = g()
    out = [next(it)]
    try:
        raise ValueError
    except ValueError:
        out.append(next(it))
        out.append(sys.exc_info()[0].__name__)
    out.append(next(it))
    return out


def body_generator_context():
    def g():
        try:
            yield
        except ValueError:
            raise KeyError("second")

    it = g()
    next(it)
    try:
        1 / 0
    except ZeroDivisionError:
        it.throw(ValueError("first"))


def body_generator_attributes():
    def g():
        yield 1

    it = g()
    kind = type(it).__name__
    return it.__name__, kind, iter(it) is it, hasattr(it, "send"), it.gi_running, isinstance(it, type(g()))


def body_generator_into_c_code():
    def g(n):
        yield from range(n)

    return (
        sorted(g(3), reverse=True), tuple(g(2)), set(g(2)), ",".join(str(i) for i in g(3)), list(enumerate(g(2))),
        list(zip(g(2), g(3))), list(itertools.chain(g(2), g(1))), list(itertools.islice(g(10), 2, 5)), any(g(2)),
        all(g(2)), min(g(3)), dict.fromkeys(g(2)), list(map(str, g(2))), list(filter(None, g(3))),
    )  # fmt: skip


def body_generator_method():
    class A:
        def __init__(self):
            self.items = [1, 2]

        def __iter__(self):
            for x in self.items:
                yield x * 10

    return list(A()), [*A()], 10 in A(), tuple(A()), sum(A())


def body_infinite_generator():
    def count():
        n = 0
        while True:
            yield n
            n += 1

    return list(itertools.takewhile(lambda x: x < 4, count())), next(itertools.islice(count(), 5, None))


def body_generator_pipeline():
    def source():
        yield from range(10)

    def double(it):
        for x in it:
            yield x * 2

    def keep(it, f):
        return (x for x in it if f(x))

    return list(keep(double(source()), lambda x: x % 3 == 0))


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
