"""The library's own bookkeeping runs none of the user's methods, and assumes nothing that one of them may decide."""

from __future__ import annotations

import datetime
import decimal
import functools
import importlib.metadata
import importlib.util
import os
import sys
import weakref
from typing import Any

import pytest
import torch

import sidefx_train


class Log:
    """The log of a run: ``lines`` is compared."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.value: Any = None
        self.number = 0


def parity(make, calls: int = 4, **options: Any) -> Any:
    """Compares the lines of ``make() -> step, between, log`` over several calls."""
    eager, plain, want = make()
    step, between, have = make()
    captured = sidefx_train.compile(step, backend="eager", **options)
    for call in range(calls):
        for fn, change, log in ((eager, plain, want), (captured, between, have)):
            if call:
                change(call)
            log.lines.append(fn(torch.ones(2) + call).tolist())
        assert have.lines == want.lines, f"call {call}"
    return captured.report()


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize("behind_a_break", [False, True])
def test_containers_with_methods_of_their_own(behind_a_break):
    """Guards and write-back read such containers without their methods: only the step's own calls are logged."""

    def make():
        log = Log()

        class Items(list):
            def __iter__(self):
                log.lines.append("iter")
                return super().__iter__()

            def __getitem__(self, index):
                log.lines.append(("item", index))
                return super().__getitem__(index)

            def __len__(self):
                log.lines.append("len")
                return super().__len__()

            def append(self, value):
                log.lines.append(("append", value))
                super().append(value)

        class Table(dict):
            def __getitem__(self, key):
                log.lines.append(("get", key))
                return super().__getitem__(key)

            def __iter__(self):
                log.lines.append("keys")
                return super().__iter__()

            def __contains__(self, key):
                log.lines.append(("has", key))
                return super().__contains__(key)

            def __missing__(self, key):
                log.lines.append(("missing", key))
                self[key] = key
                return key

        class Members(set):
            def __contains__(self, member):
                log.lines.append(("in", member))
                return super().__contains__(member)

            def __iter__(self):
                log.lines.append("members")
                return super().__iter__()

        items, table, members = Items([1, 2]), Table(a=1), Members([3])

        def step(x):
            items.append(len(items))
            if behind_a_break:
                os.times()
            total = sum([*items]) + items[0] + table["a"] + ("b" in table)
            table["z"] += "!"
            members.add(total)
            return x + (total in members) + len(table) + len(members)

        def between(call):
            table["a"] = call

        return step, between, log

    parity(make)


def test_attributes_looked_up_in_python():
    """A method ``__getattribute__`` is not called for an object's class."""

    def make():
        log = Log()

        class Watched:
            def __init__(self):
                object.__setattr__(self, "number", 1)

            def __getattribute__(self, name):
                log.lines.append(name)
                return object.__getattribute__(self, name)

        watched = Watched()

        def step(x):
            watched.number += 1
            return x * watched.number

        return step, lambda call: None, log

    parity(make)


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
def test_a_number_in_whose_place_a_tensor_comes():
    """Regression: the guard compared a tensor with the earlier number, and that raised."""

    def make():
        log = Log()

        def later(value):
            os.times()
            log.lines.append(repr(value))
            return value + 1

        def step(x):
            return later(1) + later(x)

        return step, lambda call: None, log

    parity(make)


class Comparing:
    """Compares equal to everything, in Python, and logs it."""

    def __init__(self, log):
        self.log = log

    def __eq__(self, other):
        self.log.lines.append("compared")
        return True

    __hash__ = None


def test_a_number_in_whose_place_an_object_comes():
    def make():
        log = Log()
        log.value = 1

        def step(x):
            return x + 1 if type(log.value) is int else x - 1

        def between(call):
            log.value = Comparing(log) if call % 2 else 1

        return step, between, log

    parity(make)


def cached_by_state():
    log = Log()

    @functools.lru_cache
    def scaled(n):
        return n * log.number

    def step(x):
        return x * scaled(3)

    def between(call):
        log.number = call
        if call == 3:
            scaled.cache_clear()

    return step, between, log


def cached_and_read():
    """The step reads the state as well, so that the cached function adds no new guard."""
    log = Log()

    @functools.cache
    def scaled(n):
        return n * log.number

    def step(x):
        return x * log.number + scaled(3)

    def between(call):
        log.number = call

    return step, between, log


def cached_list():
    log = Log()

    @functools.cache
    def made(n):
        return [n]

    def step(x):
        made(1).append(len(made(1)))
        log.value = made(1)
        return x + len(log.value)

    return step, lambda call: log.lines.append(made(1) is log.value), log


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize("make", [cached_by_state, cached_and_read, cached_list])
def test_a_cache_from_outside_keeps_what_it_has(make):
    parity(make)


def test_a_cache_from_outside_of_what_follows_from_its_arguments():
    def make():
        log = Log()

        @functools.lru_cache
        def inner(n):
            return tuple(range(n))

        @functools.lru_cache
        def table(n):
            return sum(inner(n)) + (table(n - 1) if n else 0)

        def step(x):
            return x * table(4)

        return step, lambda call: None, log

    assert parity(make, fullgraph=True).replays == 4


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
def test_settings_of_decimals_and_of_the_interpreter():
    """Regression: a step saw the first call's decimal precision, and the recursion limit that a capture sets."""

    def make():
        log = Log()
        log.value = decimal.Decimal("1.5")

        def step(x):
            log.value += decimal.Decimal(1) / 7
            with decimal.localcontext() as context:
                context.prec = 3
                log.lines.append(str(log.value / 3))
            log.lines.append((str(log.value), sys.getrecursionlimit()))
            return x

        def between(call):
            decimal.getcontext().prec = 4 + call

        return step, between, log

    with decimal.localcontext():
        parity(make)


def test_dates_made_in_a_step_leave_it():
    def make():
        log = Log()
        log.value = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)

        def step(x):
            spent = datetime.timedelta(seconds=log.number)
            log.value = log.value + spent
            log.lines.append((spent, log.value.date(), log.value.time(), log.value.isoformat()))
            return x

        def between(call):
            log.number = call * 1000

        return step, between, log

    assert parity(make, fullgraph=True).replays == 4


def test_an_object_finalized_in_the_step_calls_its_weakref_callback():
    """Regression: an entry of a weak dictionary remained, with a dead key."""

    def make():
        log = Log()
        table: Any = weakref.WeakKeyDictionary()

        def step(x):
            key = Log()
            table[key] = 1
            log.number = len(table)
            del key
            return x + log.number + len(table)

        return step, lambda call: log.lines.append((len(table), len(table.data))), log

    assert parity(make, fullgraph=True).replays == 4


class Asked:
    """Logs every attribute that is looked up in it."""

    seen: list[str] = []

    def __getattribute__(self, name):
        type(self).seen.append(name)
        return super().__getattribute__(name)


def looks_at_objects_that_note_it(outside, held):
    def step(x, log):
        made = Asked()
        made.value = 1
        items = [made, outside]
        log.append((items[0] is made, made.value, outside.value, [id(item) == id(made) for item in items]))
        held["object"].value += 1
        log.append((held["list"][0] == made, bool(made), hasattr(made, "nothing"), isinstance(made, dict)))
        held["made"] = made
        by_name = {"made": made, **held}
        log.append([item.value for name, item in by_name.items() if name != "list"])
        try:
            made.nothing  # noqa: B018
        except AttributeError:
            log.append("nothing")
        os.times()
        del made.value
        log.append((lambda item: item.value)(items[1]))
        log.extend(Asked.seen)
        Asked.seen.clear()
        return x * 2

    return step


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
def test_no_object_is_asked_for_its_class():
    """``isinstance`` reads ``__class__`` of an object that is not an instance."""
    lines = []
    for compiled in (False, True):
        outside = Asked()
        outside.value = 5
        step = looks_at_objects_that_note_it(outside, {"object": outside, "list": [outside]})
        step = sidefx_train.compile(step, backend="eager") if compiled else step
        lines.append([])
        for call in range(4):
            log: list[Any] = []
            Asked.seen.clear()
            step(torch.ones(2) + call, log)
            lines[-1].append(log)
    assert lines[0] == lines[1]


class Counted(type):
    """Counts the instances of its classes."""

    def __call__(cls, *args):
        cls.made.append(args)
        return super().__call__(*args)


class Plain(metaclass=Counted):
    made: list[Any] = []


class Listed(list, metaclass=Counted):
    made: list[Any] = []


class Initialized(metaclass=Counted):
    made: list[Any] = []

    def __init__(self, value):
        self.value = value


def test_a_metaclass_is_called_once():
    def step(x, log):
        log.append((type(Plain()).__name__, Listed([1, 2]), Initialized(3).value))
        log.append([list(cls.made) for cls in (Plain, Listed, Initialized)])
        return x * 2

    lines = []
    for fn in (step, sidefx_train.compile(step, backend="eager")):
        lines.append([])
        for cls in (Plain, Listed, Initialized):
            cls.made.clear()
        for call in range(3):
            fn(torch.ones(2) + call, lines[-1])
    assert lines[0] == lines[1]


def declared_constant():
    log = Log()

    @functools.lru_cache
    @torch.compiler.assume_constant_result
    def newer(version):
        log.lines.append("asked")
        return importlib.metadata.version("torch") >= version

    @torch.compiler.assume_constant_result
    def factor(n):
        return float(os.environ.get("SIDEFX_NO_SUCH_NAME", n))

    def step(x):
        return x * factor(3) if newer("1.0") else x

    return step, lambda call: None, log


def installed_versions():
    log = Log()

    def step(x):
        try:
            importlib.metadata.version("no-such-package")
        except importlib.metadata.PackageNotFoundError:
            log.value = "missing"
        try:
            importlib.metadata.metadata("no-such-package")
        except importlib.metadata.PackageNotFoundError as error:
            log.value += str(error)
        known = importlib.metadata.metadata("torch")
        return x * len(importlib.metadata.version("torch")) + len(known["Name"]) + (known is None)

    return step, lambda call: None, log


def installed_packages():
    log = Log()

    def step(x):
        if importlib.util.find_spec("no_such_package") is not None:
            return x
        log.lines.append(importlib.util.find_spec("torch").name)
        return x * 2

    return step, lambda call: None, log


@pytest.mark.parametrize("make", [declared_constant, installed_versions, installed_packages])
def test_what_stays_the_same_in_a_process_is_asked_for_in_the_capture(make):
    assert parity(make, fullgraph=True).replays == 4


def test_a_constant_that_is_an_object_or_takes_one_is_computed():
    def make():
        log = Log()

        @torch.compiler.assume_constant_result
        def window(n):
            return torch.arange(float(n))

        @torch.compiler.assume_constant_result
        def shape(x):
            return tuple(x.shape)

        def step(x):
            return x.sum() * window(3) * shape(x)[0]

        return step, lambda call: None, log

    parity(make, fullgraph=True)


@pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")
@pytest.mark.parametrize("name", ["apply_", "map_"])
def test_methods_that_call_python_for_each_element(name):
    """Regression: they wrote to the missing memory of a fake tensor, and the process crashed."""

    def step(x, seen):
        doubled = x * 2
        others = () if name == "apply_" else (x,)
        return getattr(doubled, name)(*others, lambda *values: seen.append(values) or sum(values) + 1)

    compiled = sidefx_train.compile(step, backend="eager")
    for i in range(2):
        x, expected, seen = torch.arange(3.0) + i, [], []
        assert torch.equal(compiled(x, seen), step(x, expected)) and seen == expected
