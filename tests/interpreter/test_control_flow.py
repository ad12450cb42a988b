"""Exceptions, with, match, generators: the interpreter agrees with CPython."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import traceback

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


def body_try_else_finally():
    log = []

    def f(x):
        try:
            log.append("try")
            if x:
                raise ValueError(x)
        except ValueError as e:
            log.append(f"except {e}")
        else:
            log.append("else")
        finally:
            log.append("finally")

    f(0)
    f(1)
    return log


def body_finally_overrides_return():
    def f():
        try:
            return 1
        finally:
            return 2  # noqa: B012

    def g():
        for i in range(3):
            try:
                continue
            finally:
                if i == 1:
                    break  # noqa: B012
        return i

    return f(), g()


def body_finally_runs_on_exception():
    log = []
    try:
        try:
            1 / 0
        finally:
            log.append("cleanup")
    except ZeroDivisionError as e:
        log.append(str(e))
    return log


def body_finally_replaces_exception():
    try:
        1 / 0
    finally:
        {}["x"]


def body_except_tuple_and_order():
    out = []
    for error in (ValueError("v"), KeyError("k"), OSError("o"), RuntimeError("r")):
        try:
            raise error
        except (ValueError, KeyError) as e:
            out.append(("first", e.args))
        except OSError:
            out.append("second")
        except Exception as e:
            out.append(("last", type(e).__name__))
    return out


def body_exception_name_is_deleted():
    try:
        raise ValueError
    except ValueError as e:
        pass
    return e  # noqa: F821


def body_raise_class():
    raise ValueError


def body_raise_from():
    try:
        1 / 0
    except ZeroDivisionError as e:
        raise ValueError("wrapped") from e


def body_raise_from_none():
    try:
        1 / 0
    except ZeroDivisionError:
        raise ValueError("clean") from None


def body_raise_from_class():
    raise ValueError("a") from KeyError


def body_context_is_chained():
    try:
        1 / 0
    except ZeroDivisionError:
        [][3]


def body_context_deep():
    def a():
        raise KeyError("a")

    def b():
        try:
            a()
        except KeyError:
            raise ValueError("b")

    try:
        b()
    except ValueError:
        raise TypeError("c")


def body_reraise_bare():
    try:
        try:
            1 / 0
        except ZeroDivisionError:
            raise
    except ArithmeticError as e:
        return type(e).__name__, e.__context__


def body_reraise_outside():
    raise


def body_reraise_same_object():
    error = ValueError("once")
    try:
        raise error
    except ValueError as e:
        raise e


def body_raise_non_exception():
    raise 3


def body_raise_bad_cause():
    raise ValueError from 3


def body_except_non_exception():
    try:
        raise ValueError
    except 3:
        pass


def body_exception_in_call_chain():
    def a(x):
        return b(x)

    def b(x):
        return c(x)

    def c(x):
        return x["missing"]

    a({})


def body_exception_in_native_callback():
    list(map(lambda x: 1 // x, [1, 0]))


def body_exception_in_sort_key():
    sorted([1, 2], key=lambda x: x.nope)


def body_exc_info():
    try:
        1 / 0
    except ZeroDivisionError:
        kind, value, trace = sys.exc_info()
        inside = (kind.__name__, str(value), trace is not None)
    return inside, sys.exc_info()


def body_exc_info_nested():
    out = []
    try:
        raise ValueError
    except ValueError:
        out.append(sys.exc_info()[0].__name__)
        try:
            raise KeyError
        except KeyError:
            out.append(sys.exc_info()[0].__name__)
        out.append(sys.exc_info()[0].__name__)
    return out


def body_format_exc():
    def f():
        raise ValueError("shown")

    try:
        f()
    except ValueError:
        return [line.split(",")[-1].strip() for line in traceback.format_exc().splitlines() if "File" in line]


def body_add_note():
    try:
        raise ValueError("x")
    except ValueError as e:
        e.add_note("more")
        raise


def body_exception_group():
    out = []
    try:
        raise ExceptionGroup("g", [ValueError(1), TypeError(2), ExceptionGroup("h", [ValueError(3)])])
    except* ValueError as e:
        out.append([str(x) for x in e.exceptions])
    except* TypeError as e:
        out.append(str(e.exceptions))
    return out


def body_exception_group_rest():
    try:
        raise ExceptionGroup("g", [ValueError(1), OSError(2)])
    except* ValueError:
        pass


def body_exception_star_naked():
    try:
        raise ValueError("bare")
    except* ValueError as e:
        seen = type(e).__name__, e.exceptions[0].args
    return seen


def body_exception_star_raises():
    try:
        raise ExceptionGroup("g", [ValueError(1), TypeError(2)])
    except* ValueError:
        raise KeyError("new")


def body_stop_iteration_value():
    def g():
        yield 1
        return "result"

    it = g()
    next(it)
    try:
        next(it)
    except StopIteration as e:
        return e.value


def body_assert_message():
    assert [] == [1], "lists differ"


def body_zero_division_kinds():
    out = []
    for f in (lambda: 1 / 0, lambda: 1 % 0, lambda: 1 // 0, lambda: 0**-1, lambda: divmod(1, 0), lambda: 1.0 / 0):
        try:
            f()
        except ZeroDivisionError as e:
            out.append(str(e))
    return out


def body_key_index_errors():
    out = []
    for f in (lambda: {}[1], lambda: [][1], lambda: "a"[5], lambda: (1,)[9], lambda: int("q"), lambda: None + 1):
        try:
            f()
        except Exception as e:
            out.append((type(e).__name__, str(e)))
    return out


# with


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


# match


@dataclasses.dataclass
class P2:
    x: int
    y: int


def _match(value):
    match value:
        case None:
            return "none"
        case True | False:
            return "bool"
        case 0 | 1:
            return "small"
        case int(n) if n < 0:
            return f"negative {n}"
        case int() | float():
            return "number"
        case "a" | "b" as letter:
            return f"letter {letter}"
        case str(s):
            return f"text {s}"
        case []:
            return "empty"
        case [x]:
            return f"one {x}"
        case [P2(x=0), *_]:
            return "list with point"
        case [first, *middle, last]:
            return f"{first} {middle} {last}"
        case {"kind": "point", "x": x, **rest}:
            return f"point {x} {sorted(rest)}"
        case {}:
            return "mapping"
        case P2(0, y):
            return f"on axis {y}"
        case P2(x, y) if x == y:
            return "diagonal"
        case P2():
            return "a point"
        case _:
            return "other"


def body_match_all():
    values = [
        None, True, 1, -4, 9, 2.5, "a", "zz", [], [1], (1, 2, 3), [P2(0, 1), 2], {"kind": "point", "x": 1, "z": 2},
        {"q": 1}, {}, P2(0, 3), P2(2, 2), P2(1, 2), object, {1, 2}, b"x",
    ]  # fmt: skip
    return [_match(v) for v in values]


def body_match_dotted_names():
    class C:
        A = 1
        B = 2

    def f(v):
        match v:
            case C.A:
                return "A"
            case C.B:
                return "B"

    return f(1), f(2), f(3)


def body_match_nested():
    match {"a": [1, {"b": (2, 3)}]}:
        case {"a": [int(x), {"b": (y, z)}]}:
            return x, y, z


def body_match_too_many_positional():
    match P2(1, 2):
        case P2(a, b, c):
            return a, b, c


def body_match_attribute_twice():
    match P2(1, 2):
        case P2(1, x=1):
            return 1


def body_match_no_match_args():
    class C:
        pass

    match C():
        case C(1):
            return 1


def body_match_sequence_kinds():
    def f(v):
        match v:
            case [a, b]:
                return a, b
        return "no"

    return f((1, 2)), f(range(2)), f("ab"), f(b"ab"), f({1: 2}), f(iter([1, 2]))


def body_match_custom_mapping():
    import collections

    match collections.OrderedDict(a=1, b=2):
        case {"a": a, **rest}:
            return a, rest


# generators


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


def body_loops():
    out = []
    for i in range(5):
        if i == 1:
            continue
        if i == 3:
            break
        out.append(i)
    else:
        out.append("never")
    while len(out) < 4:
        out.append(len(out))
    else:
        out.append("else")
    for i, (a, *b) in enumerate([(1, 2, 3), "xy"]):
        out.append((i, a, b))
    return out


def body_loop_over_changing_list():
    xs = [1, 2, 3]
    for x in xs:
        if x < 3:
            xs.append(x + 10)
    return xs


def body_loop_over_changing_dict():
    d = {1: 1}
    for k in d:
        d[k + 1] = 1


def body_comprehensions():
    xs = [[1, 2], [3]]
    return (
        [y for x in xs for y in x if y != 2], {k: v for k, v in zip("ab", (1, 2))}, {x % 3 for x in range(9)},
        [[j for j in range(i)] for i in range(3)], [(lambda: i)() for i in range(3)],
    )  # fmt: skip


def body_comprehension_scope():
    i = "kept"
    squares = [i * i for i in range(3)]
    return i, squares, [i for i in range(2)] + [i]


def body_comprehension_exception():
    return [1 // x for x in (1, 0)]


def body_comprehension_with_closure():
    def f(n):
        return [lambda x, i=i: x * i + n for i in range(3)]

    return [g(10) for g in f(1)]


def body_nested_functions_in_comprehension_condition():
    def ok(x):
        return x % 2

    return [x for x in range(6) if ok(x) if x > 1]


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
