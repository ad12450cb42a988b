"""Usual steps, stopped before each of their instructions and captured in parts: nothing may differ.

The values on the stack and in variables at that instruction are passed on as real objects, and the rest is captured
with them as outside objects. ``pytest -m slow`` stops at every instruction, the usual run at some of the long steps.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning
from tests.support.break_everywhere import stopped_at

LINEAR = torch.nn.Linear(2, 2)
WORLD: dict[str, Any] = {}
STEPS: list[tuple[Callable[[torch.Tensor, list[Any]], torch.Tensor], int]] = []


def every(count: int) -> Callable[[Any], Any]:
    """Registers a step, to be stopped at every ``count``-th instruction; ``make slow`` stops at each."""

    def add(step: Any) -> Any:
        STEPS.append((step, count))
        return step

    return add


def given(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


class Manager:
    def __init__(self, name: str, log: list[Any], swallows: bool = False) -> None:
        self.name, self.log, self.swallows = name, log, swallows

    def __enter__(self) -> Manager:
        self.log.append(("enter", self.name))
        return self

    def __exit__(self, kind: Any, *_: Any) -> bool:
        self.log.append(("exit", self.name, kind and kind.__name__))
        return self.swallows


@contextlib.contextmanager
def managed(name: str, log: list[Any]) -> Any:
    log.append(("in", name))
    try:
        yield name
    except ValueError as error:
        log.append(str(error))
    finally:
        log.append(("out", name))


@dataclasses.dataclass
class Number:
    value: int
    seen: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.seen.append(self.value)

    @property
    def double(self) -> int:
        return self.value * 2

    def __add__(self, other: Any) -> Number:
        return Number(self.value + (other.value if isinstance(other, Number) else other))

    __radd__ = __add__

    def __getitem__(self, index: Any) -> Any:
        return self.seen[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.seen[index] = value

    def __delitem__(self, index: Any) -> None:
        del self.seen[index]

    def __contains__(self, value: Any) -> bool:
        return value in self.seen

    def __iter__(self) -> Any:
        yield self.value
        yield from self.seen

    def __len__(self) -> int:
        return len(self.seen)

    def __bool__(self) -> bool:
        return self.value > 0

    def __lt__(self, other: Number) -> bool:
        return self.value < other.value

    def __call__(self, *args: Any) -> Any:
        return self.value, args


class Counted(Number):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.calls, super().__call__(*args)


@every(2)
def calls_and_displays(x, log):
    log.append(given(1, 2, *[3, 4], k=5, **{"a": 1}, **{"b": 2}))
    log.append([1, *[2], *(3, 4)])
    log.append({**{"a": 1}, "b": 2, **{"c": 3}})
    log.append(({1, *[2], 3}, (0, *[1], 2, *[3])))
    first, *middle, (last, *_) = 1, 2, 3, (4, 5)
    log.append((first, middle, last))
    try:
        given(**{"a": 1}, **{"a": 2})
    except TypeError as error:
        log.append(str(error))
    return (x, *[x + 1])[1]


@every(2)
def exception_groups(x, log):
    def raises():
        try:
            raise ExceptionGroup("g", [ValueError(1), TypeError(2), KeyError(3)])
        except* ValueError:
            log.append("V")
            raise RuntimeError("in V") from None
        except* TypeError as error:
            log.append(str(error))
            raise

    try:
        raises()
    except BaseException as error:
        log.append((type(error).__name__, repr(error), repr(error.__context__)))
    return x


@every(4)
def exceptions(x, log):
    def raises(n):
        try:
            if n == 0:
                raise KeyError(["a"])
            if n == 1:
                return "returned"
            if n == 2:
                [][0]
        except KeyError as error:
            try:
                raise TypeError("b") from error
            except TypeError as other:
                return repr(other.__cause__), repr(other.__context__)
        except IndexError:
            log.append("index")
            raise
        else:
            return "else"
        finally:
            log.append(("finally", n))

    for n in range(4):
        try:
            log.append(raises(n))
        except IndexError as error:
            log.append(repr(error))
    return x


@every(4)
def loops(x, log):
    total = 0
    for i, (a, b) in enumerate(zip([1, 2, 3], "abc", strict=True)):
        if i == 1:
            continue
        for j in range(i):
            if j:
                break
            total += a
        else:
            log.append((i, b))
    while total < 10:
        total += 4
        x = x + total
    log.append([key for key in {"p": 1, "q": 2} if key != "p"])
    log.append({key: value for key, value in zip("ab", [1, 2], strict=True)})
    log.append(sum(value for value in (1, 2, 3)))
    return x


@every(6)
def closures(x, log):
    n = 0

    def add(k=1, *, m=2):
        nonlocal n
        n += k * m
        return n

    adders = [lambda i=i: (add(i), n) for i in range(3)]
    log.append([fn() for fn in adders])
    log.append(functools.reduce(lambda a, b: a + b, [1, 2, 3]))
    log.append(sorted([3, 1], key=lambda value: -value))
    log.append(functools.partial(given, 1, z=2)(3, y=4))
    return x * n


@every(14)
def context_managers(x, log):
    with Manager("a", log, swallows=True) as a, Manager("b", log):
        log.append(a.name)
        raise ValueError("x")
    with contextlib.suppress(KeyError), Manager("c", log):
        {}["k"]
    with managed("d", log) as d:
        raise ValueError(d)

    def returns():
        with Manager("e", log):
            try:
                return 1
            finally:
                log.append("finally")

    log.append(returns())
    return x


@every(58)
def objects(x, log):
    one = Number(1)
    three = one + 2
    six = 3 + three
    six[0] = 7
    log.append((one.double, six.value, six[0], 7 in six, list(six), six(1, 2), len(six), bool(one), one < six))
    log.append((Number(1) == Number(1), repr(one)))
    counted = Counted(4)
    log.append((counted(1), sorted([counted, one])[0].value))
    counted.value += 1
    counted.seen += [9]
    del counted[0]
    log.append((counted.value, counted.seen, dataclasses.asdict(counted), dataclasses.replace(one, value=9).value))
    one.extra = 5
    log.append((hasattr(one, "other"), vars(one)["extra"]))
    del one.extra
    match six:
        case Number(value=6, seen=[7]):
            log.append("matched")
        case Number(value):
            log.append(value)
    return x * six.value


@every(14)
def outside(x, log):
    WORLD["n"] += 1
    WORLD["items"].append(WORLD["n"])
    WORLD["object"].value += 1
    WORLD["object"].seen.append(3)
    WORLD["tensor"].add_(x)
    WORLD["tensor"] = WORLD["tensor"] + 1
    WORLD["dict"]["k"] = WORLD["object"]
    WORLD["dict"].move_to_end("a")
    WORLD["set"].add(WORLD["n"])
    WORLD["deque"].append(WORLD["n"])
    WORLD["deque"].rotate(1)
    one = other = WORLD["items"]
    other += [0]
    log.append((one is other, len(one), list(WORLD["dict"])[:2], sorted(WORLD["set"]), list(WORLD["deque"])))
    log.append((WORLD["object"].value, WORLD["object"].seen[-2:], repr(WORLD["error"])))
    WORLD["items"].pop()
    del WORLD["dict"]["k"]
    WORLD.setdefault("new", []).append(1)
    log.append((WORLD["dict"], len(WORLD.pop("new"))))
    return WORLD["tensor"].clone()


@every(26)
def training(x, log):
    weight = torch.ones(2, requires_grad=True)
    loss = ((LINEAR(x) * weight) ** 2).sum()
    loss.backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
    log.append(weight.detach().tolist())
    total = LINEAR.weight.grad.sum() + weight.detach().sum()
    LINEAR.zero_grad()
    return total


@every(6)
def texts_and_numbers(x, log):
    n = len(log)
    log.append(f"{n:03d} {n!r} {'a' + str(n)} {x.shape}")
    log.append(("%s-%d" % ("a", n), "{} {k}".format(1, k=n), ",".join(str(i) for i in range(3))))  # noqa: UP031, UP032
    assert n == 0, "a message"
    log.append((n < 1 <= 2 != 3, x is x and x is not None, "abc"[1:].upper().split("C")))
    i = 5
    i **= 2
    i //= 3
    i <<= 2
    i ^= 3
    log.append((i, -i, ~i, i if i > 3 else None, n or i, n and i))
    return x[0] + x[-1]


def fresh_world() -> None:
    WORLD.clear()
    WORLD.update(n=0, items=[], object=Number(1), tensor=torch.zeros(2), dict=collections.OrderedDict(a=1), set={1, 2})
    WORLD.update(deque=collections.deque([1], maxlen=3), error=ValueError([1], {"a": (2, [3])}))
    LINEAR.zero_grad()


def course(step: Any) -> str:
    fresh_world()
    seen = []
    for call in range(2):
        log: list[Any] = []
        try:
            log.append(step(torch.full((2,), float(call)), log).tolist())
        except Exception as error:
            log.append(repr(error))
        seen.append(log)
    kept = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in WORLD.items()}
    return f"{seen} {kept}"


def sweep(step: Any, count: int) -> None:
    want, at, made, differing = course(step), 1, 0, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        while True:
            with stopped_at(at) as cuts:
                have = course(sidefx_train.compile(step, backend="eager"))
            if cuts.over:
                break
            made += cuts.made
            if have != want:
                differing[at] = have
            at += count
    assert made > at / count / 2, f"only {made} of {at // count} places could be cut"
    assert not differing, f"cut at {list(differing)} of {at}:\n{next(iter(differing.values()))}\ninstead of\n{want}"


@pytest.mark.parametrize(("step", "count"), STEPS, ids=[step.__name__ for step, _ in STEPS])
@pytest.mark.every(4)
def test_cut_at_some_instructions(step: Any, count: int) -> None:
    sweep(step, count)


@pytest.mark.slow
@pytest.mark.parametrize("step", [step for step, count in STEPS if count > 1], ids=lambda step: step.__name__)
def test_cut_at_every_instruction(step: Any) -> None:
    sweep(step, 1)
