"""Objects made in the step: how they leave it, and their finalizers."""

from __future__ import annotations

import collections
import functools
import gc
import types

import pytest

from sidefx_train.errors import GraphBreakError
from tests.support.interpreter_compiled import cases, check_case, check_refused, compiled


class Slotted:
    __slots__ = ("n", "items")

    def __init__(self, n):
        self.n = n
        self.items = [n]


class Named(Slotted):
    def __init__(self, n):
        super().__init__(n)
        self.name = f"named {n}"


class Words(set):
    pass


class Text(str):
    pass


class Recent(collections.deque):
    pass


class Problem(ValueError):
    def __init__(self, code):
        super().__init__(code, "problem")
        self.code = code


def case_objects_made_in_the_step_leave_it():
    kept = []

    def body():
        words = Words("ab")
        words.note = len(kept)
        made = [Slotted(1), Named(2), words, Text("abc"), types.SimpleNamespace(a=[1]), Recent([1, 2], maxlen=2)]
        kept.append(made)
        return made

    return body, kept


def case_exceptions_leave_the_step():
    kept = []

    def body():
        for make in (lambda: Problem(3), lambda: {}["k"], lambda: None.x, lambda: [].pop(), lambda: int("z")):
            try:
                error = make()
                if error is not None:
                    raise error from KeyError("cause")
            except Exception as error:
                kept.append((error, error.args, repr(error.__cause__), getattr(error, "name", None), vars(error)))
        return len(kept)

    return body, kept


def case_functions_leave_the_step():
    kept = []

    def body():
        start = len(kept)

        def add(a, *, by: int = start) -> int:
            """Adds."""
            return a + by

        @functools.wraps(add)
        def wrapped(a):
            return add(a) + 100

        wrapped.extra = [start]
        kept.append(wrapped)
        return wrapped

    def watched():
        return [
            (f(1), f.__name__, f.__doc__, f.__qualname__, f.__annotations__, f.extra, f.__wrapped__(1)) for f in kept
        ]

    return lambda: (body(), watched())[1], None


def refused_instance_of_a_class_made_in_the_step():
    def body():
        class Local:
            pass

        return Local()

    return body, None


def case_errors_of_exec():
    def body():
        found = []
        for source in ("1 +", "x = undefined_name", "raise KeyError('k')"):
            try:
                exec(source, {})
            except Exception as error:
                found.append((type(error).__name__, str(error)))
        return found

    return body, None


def test_finalizers_run_for_real_objects_only():
    log = []

    class Owner:
        def __init__(self):
            self.n = 0

        def __del__(self):
            log.append("deleted")

    class Slim(Owner):
        __slots__ = ("m",)

    owner, slim = Owner(), Slim()

    def body():
        owner.n += 1
        slim.m = owner.n
        return owner.n

    step = compiled(body)
    assert [step(), step()] == [1, 2]
    gc.collect()
    assert log == [], "a shadow ran __del__"
    del owner, slim, body, step
    gc.collect()
    assert log == ["deleted", "deleted"]


def test_finalizer_of_a_new_object_is_refused():
    """A replay creates no such object, so nothing would be deleted."""

    class Owner:
        def __del__(self):
            pass

    with pytest.raises(GraphBreakError, match="__del__"):
        compiled(lambda: Owner().__class__.__name__)()


@pytest.mark.parametrize("case", cases(globals(), "refused_"), ids=lambda case: case.__name__.removeprefix("refused_"))
def test_refused(case):
    """Code that is not captured gives a reason, and runs as before."""
    check_refused(case, "SFX111")


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__.removeprefix("case_"))
def test_three_ways(case):
    check_case(case)
