"""Every body is stopped before each of its instructions, and continues natively: nothing may differ."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from typing import Any

import pytest

from sidefx_train.compile.capture.interpreter.interpreter import Interpreter
from sidefx_train.compile.capture.interpreter.world import DirectWorld
from sidefx_train.compile.capture.resume.statements import DataCalls
from sidefx_train.compile.capture.resume.suspension import StopPoint, stop_points
from sidefx_train.errors import Unsupported
from tests.support.breaks import check_every_instruction, check_same, continued
from tests.support.interpreter import bodies, observe


class Manager:
    def __init__(self, name: str, swallow: type[BaseException] | None = None) -> None:
        self.name, self.swallow = name, swallow

    def __enter__(self) -> Manager:
        print("enter", self.name)
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool:
        print("exit", self.name, kind and kind.__name__)
        return self.swallow is not None and kind is not None and issubclass(kind, self.swallow)

    @property
    def doubled(self) -> str:
        return self.name * 2

    def __getitem__(self, key: Any) -> Any:
        return (self.name, key)

    def __iadd__(self, other: Any) -> Manager:
        self.name += str(other)
        return self


def body_loops() -> Any:
    total, names = 0, []
    for i in range(4):
        if i == 1:
            continue
        for j, name in enumerate("ab"):
            total += i * j
            names.append((name, total))
        if i == 3:
            break
    else:
        names.append("never")
    while total > 10:
        total -= 7
    return total, names


def body_calls_with_every_kind_of_argument() -> Any:
    def inner(a: int, /, b: int = 2, *rest: int, c: int = 3, **more: int) -> Any:
        return a, b, rest, c, more

    def outer(n: int) -> Any:
        return [inner(n, *range(n), **{"x": n}), inner(n, c=n + 1), max(n, inner(n)[1])]

    return outer(2), outer(b"!"[0] - 30)


def body_with() -> Any:
    found = []
    with Manager("a") as a, Manager("b", ValueError) as b:
        found.append(a.doubled + b.doubled)
        int("no number")
        found.append("not reached")
    with Manager("c"):
        found.append(b[1:2])
    b += 3
    return found, b.name


def body_try() -> Any:
    found = []

    def risky(n: int) -> int:
        try:
            if n == 2:
                raise KeyError(n)
            return 10 // n
        except KeyError as error:
            found.append(("key", str(error)))
            return -1
        finally:
            found.append(("finally", n))

    for n in (1, 2, 0):
        try:
            found.append(risky(n))
        except ZeroDivisionError as error:
            found.append(("zero", str(error), type(error.__context__).__name__))
        else:
            found.append("else")
    return found


def body_raises() -> Any:
    def inner(values: list[int]) -> int:
        return values[3]

    def outer() -> int:
        kept = [1, 2]
        return inner(kept) + 1

    return outer()


def body_closures() -> Any:
    count = 0

    def bump(by: int = 1) -> int:
        nonlocal count
        count += by
        return count

    def make(k: int) -> Any:
        def add(x: int) -> int:
            return x + k + count

        return add

    adders = [make(k) for k in range(3)]
    bump()
    bump(by=3)
    return [add(10) for add in adders], count, bump.__closure__ is not None


def body_comprehensions_and_unpacking() -> Any:
    squares = {k: k * k for k in range(4) if k % 2}
    first, *rest = sorted({3, 1, 2})
    nested = [[row[i] for row in ((1, 2), (3, 4))] for i in range(2)]
    a, (b, c) = 1, (2, 3)
    return squares, first, rest, nested, sum(x for x in (a, b, c)), [*rest, *nested[0]], {**squares, "z": 1}


def body_match_and_formatting() -> Any:
    def kind(value: Any) -> str:
        match value:
            case {"k": k, **others}:
                return f"mapping {k!r} {len(others):>3}"
            case [x, *_] if x:
                return f"sequence {x}"
            case int() | float():
                return "number"
            case _:
                return "other"

    return [kind(v) for v in ({"k": 1, "m": 2}, [1, 2], [0], 2.5, None)]


def body_booleans() -> Any:
    values = [0, 1, None, "", "x"]
    a = [v or "empty" for v in values]
    b = [v and "full" for v in values]
    c = ["none" if v is None else "some" for v in values]
    return a, b, c, 1 < len(values) < 10, not values, 1 in values, (n := 3) + n


def body_methods() -> Any:
    class Base:
        def greet(self, name: str) -> str:
            return f"base {name}"

    class Derived(Base):
        level: int = 2

        def greet(self, name: str) -> str:
            return Base.greet(self, name).upper() + "!" * self.level

    made = Derived()
    made.level += 1
    del made.level
    return made.greet("x"), "a,b".split(",").index("b"), [].append.__name__, Derived.level


def now_handling() -> str:
    return repr(sys.exc_info()[1])


def body_handlers() -> Any:
    found = []

    def inner(level: int) -> str:
        try:
            [][level]
        except IndexError as error:
            found.append((now_handling(), error.args))
            try:
                raise KeyError(level) from error
            except (KeyError, ValueError) as second:
                found.append((now_handling(), repr(second.__cause__), repr(second.__context__)))
                return f"{second!r} in {now_handling()}"
            finally:
                found.append(("finally", now_handling()))
        finally:
            found.append(("last", now_handling()))

    def again(depth: int) -> None:
        try:
            if depth:
                again(depth - 1)
            else:
                int("x")
        except ValueError:
            found.append((depth, now_handling()))
            if depth == 2:
                raise RuntimeError("out") from None
            raise

    for i in range(2):
        try:
            found.append(inner(i))
            again(i + 1)
        except Exception as error:
            found.append((type(error), repr(error.__context__), error.__suppress_context__))
            continue
        finally:
            found.append(now_handling())
    with Manager("w", KeyError):
        try:
            {}["k"]
        finally:
            found.append(now_handling())
    return found, now_handling()


def body_exception_groups() -> Any:
    found = []
    try:
        raise ExceptionGroup("several", [KeyError("a"), ValueError("b"), TypeError("c")])
    except* KeyError as group:
        found.append((len(group.exceptions), now_handling()))
    except* ValueError:
        found.append(now_handling())
    except* TypeError as group:
        found.append(repr(group.exceptions))
    return found, now_handling()


def body_leaves_handlers() -> Any:
    found = []
    for i in range(4):
        try:
            try:
                raise LookupError(i)
            except LookupError as error:
                if i == 0:
                    continue
                if i == 3:
                    break
                found.append(error.args[0])
        finally:
            found.append((i, now_handling()))
    return found, now_handling()


def body_raises_out_of_a_handler() -> Any:
    try:
        try:
            {}["first"]
        except KeyError:
            [][1]
    finally:
        print("finally", now_handling())


class Seed:
    base_level = 1

    def __init__(self) -> None:
        self.level = 0

    def greet(self, name: str) -> str:
        return f"hello {name} {self.level}"


class Grown(Seed):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.level = super().base_level + start

    def greet(self, name: str) -> str:
        shout = lambda: super(Grown, self).greet(name.upper())  # noqa: E731
        return f"{super().greet(name)} {shout()} {super().greet(str(self.level))}"

    @classmethod
    def made(cls, *sizes: int) -> list[Any]:
        return [cls(size).greet("y") for size in sizes] + [super().__repr__.__name__]


def body_super() -> Any:
    return Grown(3).greet("x"), Grown.made(1, 2)


def body_with_return_inside() -> Any:
    def early(n: int) -> str:
        for i in range(3):
            with Manager(str(i)):
                if i == n:
                    return f"left at {i}"
        return "end"

    return early(1), early(5)


def body_deletes_and_globals() -> Any:
    global _SEEN
    _SEEN = [1]
    _SEEN.append(2)
    local = {"a": 1, "b": 2}
    del local["a"]
    found = (local, list(_SEEN))
    del local, _SEEN
    return found


def body_unset_variables() -> Any:
    def inner() -> list[str]:
        errors = []
        try:
            late += errors  # noqa: F823
        except NameError as error:
            errors.append(f"{type(error).__name__} {error}")
        try:
            free()
        except NameError as error:
            errors.append(f"{type(error).__name__} {error}")
        late = held = [1]
        return [*errors, *(str(item) for item in held)]

    found = inner()
    free = inner
    return found, free is inner


MOST = 200
"""Places of a body at which the quick tests stop; those marked slow stop at all."""


@pytest.mark.parametrize("most", [MOST, pytest.param(sys.maxsize, marks=pytest.mark.slow)], ids=["many", "all"])
@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
@pytest.mark.every(3)
def test_stopped_at_every_instruction(body: Any, most: int) -> None:
    """Stops at every second, third, ... instruction of bodies with more than ``most``."""
    check_every_instruction(body, most)


class AnyCall(DataCalls):
    """Lets every statement run natively as a whole."""

    def is_of_c(self, fn: Any) -> bool:
        return True

    gathers = is_of_c


class AnyName(frozenset[str]):
    def __contains__(self, name: object) -> bool:
        return True


def _statement_at(body: Any, at: int, patch: pytest.MonkeyPatch) -> StopPoint | None:
    """Returns where the statement begins that contains an instruction; ``None`` if it has no one end."""

    def stop(interp: Interpreter) -> Any:
        raise Unsupported("SFX103", "test")

    interp = Interpreter(DirectWorld())
    interp.stop_at = at
    with patch.context() as patched, contextlib.redirect_stdout(io.StringIO()):
        patched.setattr(Interpreter, "suspend", stop)
        try:
            interp.run(body)
        except Unsupported as reached:
            data = AnyCall(object, AnyName(), (), AnyName(), lambda value: True)
            points = stop_points(reached, "SFX103", "test", None, data)
            return next((point for point in points if point.statement), None)
        except Exception:  # the body caught nothing of it
            return None
    return None


@pytest.mark.parametrize("most", [MOST // 4, pytest.param(sys.maxsize, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
@pytest.mark.every(3)
def test_statements_run_natively(body: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the statement around an instruction, and those around it that call something, natively as a whole."""
    file = body.__code__.co_filename
    wanted = observe(lambda: body(), file)
    counting = Interpreter(DirectWorld())
    with contextlib.suppress(Exception):
        observe(lambda: counting.run(body), file)
    ran = 0
    for at in range(1, counting.begun + 1, 1 + counting.begun // most):
        point = _statement_at(body, at, monkeypatch)
        if point is None:
            continue
        outcome: list[str] = []
        found = observe(functools.partial(continued, body, point.count, point, outcome), file)
        if outcome != ["stopped"]:
            continue
        ran += 1
        check_same(found, wanted, f"{point.statement} at instruction {at}")
    print(f"{body.__name__}: {ran}")
    assert ran > 2, f"{ran} statements ran natively"
