"""Objects with observable finalization, held only by a function after a break: they are freed as in eager."""

from __future__ import annotations

import collections
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sidefx_train
from tests.support.call_sequences import course

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


def breaks_here() -> None:
    os.times()


def cleaning(log, name="generator"):
    try:
        yield 1
        yield 2
    finally:
        log.append(f"{name} closed")


def started(log, name="generator"):
    made = cleaning(log, name)
    next(made)
    return made


class Thing:
    pass


class Finalized:
    def __init__(self, log):
        self.log = log

    def __del__(self):
        self.log.append("finalized")


def in_a_list(x, log):
    held = [started(log)]
    breaks_here()
    log.append("before")
    del held
    log.append("after")
    return x


def taken_out_of_a_list(x, log):
    held = [started(log, str(number)) for number in range(3)]
    breaks_here()
    while held:
        held.pop(0)
        log.append(len(held))
    return x


def in_an_object(x, log):
    held = Thing()
    held.generator = started(log)
    breaks_here()
    log.append("before")
    held.generator = None
    log.append("after")
    return x


def taken_out_of_a_dict(x, log):
    held = {"generator": started(log)}
    breaks_here()
    log.append("before")
    held.pop("generator")
    log.append("after")
    return x


def in_a_tuple_that_is_not_read_again(x, log):
    held = (1, (started(log), 2))
    breaks_here()
    log.append("before")
    held = None
    log.append("after")
    return x if held is None else held


def in_a_closure(x, log):
    held = started(log)

    def goes_on():
        return next(held, 5)

    breaks_here()
    log.append(goes_on())
    goes_on = held = None
    log.append("after")
    return x if goes_on is held else None


def finalized(x, log):
    held = Finalized(log)
    breaks_here()
    log.append("before")
    del held
    log.append("after")
    return x


def finalized_in_a_list(x, log):
    held = [Finalized(log)]
    log.append("before")
    held.clear()
    log.append("after")
    return x


def missed_by_a_set(x, log):
    watching: Any = weakref.WeakSet()
    held = Thing()
    watching.add(held)
    breaks_here()
    breaks_here()
    log.append(len(watching))
    del held
    log.append(len(watching))
    return x


def missed_at_the_end_of_a_function(x, log):
    watching: Any = weakref.WeakSet()

    def inner():
        held = Thing()
        watching.add(held)
        breaks_here()
        held = None
        return len(watching) if held is None else None

    log.append(inner())
    log.append(len(watching))
    breaks_here()
    log.append(len(watching))
    return x


def an_argument_is_missed(x, log):
    watching: Any = weakref.WeakSet()

    def inner(held):
        watching.add(held)
        breaks_here()
        held = None
        return len(watching) if held is None else None

    log.append(inner(Thing()))
    return x


def missed_by_references(x, log):
    held = [Thing(), Thing()]
    references = [weakref.ref(item) for item in held]
    breaks_here()
    log.append([reference() is None for reference in references])
    held.pop()
    log.append([reference() is None for reference in references])
    held = None
    log.append([reference() is None for reference in references])
    return x if held is None else None


def missed_by_a_dict(x, log):
    watching: Any = weakref.WeakValueDictionary()
    held = Thing()
    watching["held"] = held
    breaks_here()
    log.append(list(watching))
    held = None
    log.append(list(watching))
    return x if held is None else None


def a_tensor_is_missed(x, log):
    held = x * 2
    reference = weakref.ref(held)
    breaks_here()
    log.append(reference() is held)
    del held
    log.append(reference() is None)
    return x


STEPS = [
    in_a_list, taken_out_of_a_list, in_an_object, taken_out_of_a_dict, in_a_tuple_that_is_not_read_again, in_a_closure,
    finalized, finalized_in_a_list, missed_by_a_set, missed_at_the_end_of_a_function, missed_by_references,
    missed_by_a_dict, a_tensor_is_missed,
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_finalizers_run_in_time(step: Any) -> None:
    assert course(sidefx_train.compile(step, backend="eager")) == course(step)


def test_an_argument_is_missed_in_time() -> None:
    """CPython moves an argument into the called frame, so that the caller does not hold it.

    The values are written down, since eager's depend on what else the process does: while any thread has a frame
    evaluation function (PEP 523) installed, as Dynamo has, the caller holds the arguments until the call returns.
    """
    expected = [f"[0, [{number}.0, {number}.0]]" for number in range(4)]
    assert course(sidefx_train.compile(an_argument_is_missed, backend="eager")) == expected


def test_the_report_says_why() -> None:
    compiled = sidefx_train.compile(in_a_list, backend="eager")
    course(compiled)
    found = [record for part in compiled.report().parts for record in part.breaks]
    assert [record.code for record in found] == ["SFX115"], found
    assert "a suspended generator, which has a pending finally" in found[0].reason


def test_what_is_held_outside_too_stops_nothing() -> None:
    kept: list[Any] = []
    watching: Any = weakref.WeakSet()

    def step(x, log):
        held = kept[0] if kept else Thing()
        kept.append(held)
        watching.add(held)
        breaks_here()
        log.append(len(watching))
        return x * 2

    def of(step: Any) -> Any:
        kept.clear()
        watching.clear()
        return course(step)

    compiled = sidefx_train.compile(step, backend="eager")
    assert of(compiled) == of(step)
    of(compiled)
    codes = {record.code for part in compiled.report().parts for record in part.breaks}
    assert "SFX115" not in codes, codes


def _check_course(program: Callable[[], tuple[Any, Any]]) -> None:
    """Compares the logs of six calls of ``step(x, log, call)``, each after ``enter(call)``."""
    courses: list[list[Any]] = []
    for compiled in (False, True):
        step, enter = program()
        step = sidefx_train.compile(step, backend="eager") if compiled else step
        courses.append([])
        for call in range(6):
            enter(call)
            step(torch.ones(2), courses[-1], call)
    assert courses[0] == courses[1]


@pytest.mark.parametrize("make", [weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary])
@pytest.mark.parametrize("where", ["list", "dict", "attribute"])
@pytest.mark.every(2)
def test_what_is_taken_from_outside_is_missed(make: Any, where: str) -> None:
    """An object that only an outside container holds is freed where the step removes it."""

    def program() -> Any:
        watching, kept, owner = make(), [], Thing()
        held: dict[str, Any] = {}

        def enter(call: int) -> None:
            made, key = Thing(), f"key {call}"
            watching.add(made) if make is weakref.WeakSet else watching.__setitem__(
                *((made, key) if make is weakref.WeakKeyDictionary else (key, made))
            )
            kept.append(made) if where == "list" else held.__setitem__("kept", made)
            owner.kept = made
            if where != "attribute":
                del owner.kept
            if where == "attribute":
                held.clear()

        def step(x, log, call):
            log.append(len(watching))
            if where == "list" and len(kept) > 1:
                kept.pop(0)
            elif where == "dict":
                held["kept"] = None
            elif where == "attribute":
                owner.kept = None
            log.append(len(watching))
            return x * 2

        return step, enter

    _check_course(program)


@pytest.mark.parametrize("kind", [started, lambda log, name: Finalized(log)], ids=["generator", "object"])
@pytest.mark.parametrize("where", ["list", "attribute", "dict"])
@pytest.mark.every(2)
def test_an_outside_object_is_finalized_in_the_step(kind: Any, where: str) -> None:
    def program() -> Any:
        lines: list[Any] = []
        kept: list[Any] = []
        table: dict[str, Any] = {}
        owner = Thing()

        def enter(name: str) -> None:
            made = kind(lines, name)
            if where == "list":
                kept.append(made)
            elif where == "dict":
                table["made"] = made
            else:
                owner.made = made

        def step(x):
            lines.append("before")
            if where == "list":
                kept.pop()
            elif where == "dict":
                del table["made"]
            else:
                owner.made = None
            lines.append("after")
            return x * 2

        return step, enter, lines

    courses = []
    for compiled in (False, True):
        step, enter, lines = program()
        step = sidefx_train.compile(step, backend="eager") if compiled else step
        for call in range(4):
            enter(f"call {call}")
            step(torch.ones(2))
        courses.append(lines)
    assert courses[0] == courses[1]


def test_an_object_from_outside_with_a_proxy():
    """Regression: a proxy has no attribute to read its callback from; the step ran eagerly."""
    runs = []
    for compiled in (False, True):
        log: list[Any] = []
        box = Thing()
        box.scale = 2
        proxy = weakref.proxy(box)

        def step(x, box=box, log=log, proxy=proxy):
            held = box
            breaks_here()
            held.scale += 1
            log.append(proxy.scale)
            return x * proxy.scale

        run = sidefx_train.compile(step, backend="aot_eager") if compiled else step
        log += [run(torch.ones(2)).tolist() for _ in range(3)]
        runs.append(log)
    assert runs[0] == runs[1]
    assert not run.report().fallbacks


def _observe(how: str, made: Any, seen: list[Any]) -> Any:
    """Lets weak references show in ``seen`` that an object is gone."""
    if how == "finalize":
        return weakref.finalize(made, seen.append, "gone")
    return weakref.ref(made, lambda ref: seen.append("gone"))


@pytest.mark.parametrize("how", ["callback", "finalize"])
@pytest.mark.parametrize("where", ["list", "deque", "attribute", "dict", "changing index"])
@pytest.mark.every(2)
def test_a_callback_shows_that_an_outside_object_is_gone(how: str, where: str) -> None:
    def program() -> Any:
        seen: list[Any] = []
        owner, observers = Thing(), []
        owner.items, owner.queue, owner.table = [None] * 4, collections.deque(maxlen=2), {}
        owner.queue.extend([1, 2])

        def enter(call: int) -> None:
            made = Thing()
            if where == "list":
                owner.items.append(made)
            elif where == "deque":
                owner.queue.clear()
                owner.queue.extend([made, made])
            elif where == "attribute":
                owner.made = made
            elif where == "dict":
                owner.table["made"] = made
            elif call >= 3:
                owner.items[call % 4] = made
            if where != "changing index" or call >= 3:
                observers.append(_observe(how, made, seen))

        def step(x, log, call):
            if where == "list":
                owner.items.pop()
            elif where == "deque":
                owner.queue.append(3)
                owner.queue.append(4)
            elif where == "attribute":
                owner.made = None
            elif where == "dict":
                del owner.table["made"]
            else:
                owner.items[call % 4] = call
            log.append(len(seen))
            return x * 2

        return step, enter

    _check_course(program)


@pytest.mark.parametrize("kind", [Thing, lambda: torch.ones(1)], ids=["object", "tensor"])
@pytest.mark.parametrize("make", [weakref.ref, weakref.proxy, weakref.WeakSet, weakref.WeakKeyDictionary])
@pytest.mark.every(2)
def test_a_reference_of_the_step_to_what_it_takes_from_outside(make: Any, kind: Any) -> None:
    def program() -> Any:
        kept = [kind() for _ in range(6)]

        def step(x, log):
            if make is weakref.ref:
                reference = weakref.ref(kept[0])
                kept.pop(0)
                log.append(reference() is None)
            elif make is weakref.proxy:
                proxy = weakref.proxy(kept[0])
                kept.pop(0)
                try:
                    log.append(proxy.grad)
                except (AttributeError, ReferenceError) as error:
                    log.append(str(error))
            else:
                members = make()
                members.add(kept[0]) if make is weakref.WeakSet else members.__setitem__(kept[0], 1)
                kept.pop(0)
                log.append(len(members))
            return x * 2

        return step

    assert course(sidefx_train.compile(program(), backend="eager")) == course(program())
