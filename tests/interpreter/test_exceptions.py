"""Exceptions, their causes, contexts and groups: the interpreter agrees with CPython."""

from __future__ import annotations

import sys
import traceback

import pytest

from tests.support.interpreter import bodies, check


class Locked(Exception):
    def __setattr__(self, name, value):
        raise TypeError(f"sets {name}")


def body_exceptions_that_cannot_be_assigned_to():
    def fails():
        raise Locked("inner")

    def ends():
        yield 1
        raise Locked("at the end")

    found = []
    try:
        try:
            fails()
        except Locked as error:
            raise Locked("outer") from error
    except Locked as error:
        found += [error.args, error.__cause__.args, error.__context__ is error.__cause__]
        found.append(error.__traceback__.tb_next is None)
    try:
        list(ends())
    except Locked as error:
        found.append(error.args)
    try:
        raise ExceptionGroup("both", [Locked("one"), ValueError("two")])
    except* Locked as group:
        found.append(len(group.exceptions))
    except* ValueError as group:
        found.append(len(group.exceptions))
    return found


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


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
