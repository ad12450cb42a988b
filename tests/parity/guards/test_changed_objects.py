"""State that a step has read changes between two calls, while the objects it holds stay the same."""

from __future__ import annotations

import abc
import collections
import enum
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

import sidefx_train

Case = tuple[Callable[[torch.Tensor], Any], list[Callable[[], Any]]]
CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


class Thing:
    """Belongs to no abstract class at first."""


@case
def registered_with_an_abstract_class() -> Case:
    abstract = abc.ABCMeta("abstract", (), {})
    thing = type("Of", (), {})()
    return lambda x: x + isinstance(thing, abstract), [lambda: abstract.register(type(thing))]


@case
def registered_with_an_abstract_class_of_tensors() -> Case:
    abstract = abc.ABCMeta("abstract", (), {})
    return lambda x: x + (isinstance(x, (int, abstract)) + 2 * isinstance(x.sin(), abstract)), [
        lambda: abstract.register(torch.nn.Parameter),
        lambda: abstract.register(torch.Tensor),
    ]


@case
def registered_with_a_subclass_of_it() -> Case:
    abstract = abc.ABCMeta("abstract", (), {})
    below = abc.ABCMeta("below", (abstract,), {})
    thing = type("Of", (), {})
    return lambda x: x + issubclass(thing, (int, abstract)), [lambda: below.register(thing)]


@case
def registered_as_a_mapping() -> Case:
    thing = type("Of", (), {})()

    def step(x):
        match thing:
            case Mapping():
                return x + 1
        return x

    return step, [lambda: Mapping.register(type(thing))]


@case
def registered_with_another() -> Case:
    abstract, other = abc.ABCMeta("abstract", (), {}), abc.ABCMeta("other", (), {})
    thing = type("Of", (), {})()
    return lambda x: x + isinstance(thing, abstract), [lambda: other.register(type(thing))]


@case
def registered_for_a_dispatcher() -> Case:
    abstract = abc.ABCMeta("abstract", (), {})
    shown = functools.singledispatch(lambda value: 1)
    shown.register(abstract)(lambda value: 2)
    thing = type("Of", (), {})()
    return lambda x: x + shown(thing), [lambda: abstract.register(type(thing))]


@case
def an_imported_module_replaced() -> Case:
    sys.modules["world_module"] = _module("world_module", n=1)

    def step(x):
        import world_module

        return x + world_module.n

    return step, [
        lambda: sys.modules.update(world_module=_module("world_module", n=2)),
        lambda: sys.modules.update(world_module=types.SimpleNamespace(n=3)),
    ]


@case
def a_module_of_imported_names_replaced() -> Case:
    sys.modules["world_package"] = package = _module("world_package", __path__=[])
    sys.modules["world_package.part"] = part = _module("world_package.part", n=1)
    package.part = part

    def step(x):
        from world_package import part
        from world_package.part import n

        return x + part.n + n

    return step, [
        lambda: sys.modules.update({"world_package.part": _module("world_package.part", n=5)}),
        lambda: setattr(package, "part", _module("world_package.part", n=7)),
        lambda: delattr(package, "part"),
        lambda: setattr(sys.modules["world_package.part"], "n", 9),
    ]


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    return module


@case
def the_class_of_a_module() -> Case:
    module = _module("world_turned", n=1)
    kind = type("Kind", (types.ModuleType,), {"n": property(lambda self: 5)})
    return lambda x: x + module.n, [lambda: setattr(module, "__class__", kind)]


@case
def the_factory_of_a_defaultdict() -> Case:
    counts: Any = collections.defaultdict(int)

    def step(x):
        value = counts["k"]
        del counts["k"]
        return x + value

    return step, [lambda: setattr(counts, "default_factory", lambda: 5)]


@case
def attributes_of_a_descriptor() -> Case:
    class Reads:
        value = 1

        def __get__(self, obj, owner):
            return self.value

    class Owner:
        read = Reads()

    owner = Owner()
    return lambda x: x + owner.read, [
        lambda: setattr(vars(Owner)["read"], "value", 4),
        lambda: setattr(Reads, "__get__", lambda self, obj, owner: 7),
    ]


@case
def a_descriptor_that_counts() -> Case:
    class Reads:
        seen = 0

        def __get__(self, obj, owner):
            self.seen += 1
            return self.seen

    class Owner:
        read = Reads()

    owner = Owner()
    return lambda x: x + owner.read, [lambda: setattr(vars(Owner)["read"], "seen", 40)]


@case
def a_member_of_an_enumeration() -> Case:
    class Kind(enum.Enum):
        a = 1

        def doubled(self):
            return self.value * 2

    return lambda x: x + Kind.a.doubled() + getattr(Kind.a, "extra", 0), [
        lambda: setattr(Kind.a, "_value_", 5),
        lambda: setattr(Kind.a, "extra", 5),
        lambda: setattr(Kind, "doubled", lambda self: 100),
    ]


@case
def how_keys_are_compared() -> Case:
    class Key:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            return True

    table, key = {Key(): 5}, Key()
    return lambda x: x + table.get(key, 0), [lambda: setattr(Key, "__eq__", lambda self, other: self is other)]


@case
def a_dict_behind_a_view() -> Case:
    table = {"a": 1}
    view = types.MappingProxyType(table)
    return lambda x: x + view["a"] + len(view), [lambda: table.update(a=5), lambda: table.update(b=5)]


@case
def the_namespace_of_a_class() -> Case:
    class Owner:
        a = 1

    return lambda x: x + vars(Owner)["a"] + Owner.__dict__.get("b", 0) + ("c" in vars(Owner)), [
        lambda: setattr(Owner, "a", 5),
        lambda: setattr(Owner, "b", 5),
        lambda: setattr(Owner, "c", 5),
    ]


@case
def what_bases_do_with_subclasses() -> Case:
    class Base:
        @classmethod
        def __init_subclass__(cls):
            cls.n = 1

    def step(x):
        class Made(Base):
            pass

        return x + Made.n

    return step, [lambda: setattr(Base, "__init_subclass__", classmethod(lambda cls: setattr(cls, "n", 7)))]


@case
def subclasses_of_a_class() -> Case:
    class Base:
        pass

    held = []
    return lambda x: x + len(Base.__subclasses__()), [lambda: held.append(type("Below", (Base,), {}))]


@case
def an_attribute_of_a_tensor() -> Case:
    held = torch.ones(2)

    def step(x):
        return x + held.sum() + getattr(held, "tag", 0)

    return step, [lambda: setattr(held, "tag", 5), lambda: setattr(held, "sum", lambda: 9)]


@case
def settings_of_torch() -> Case:
    def step(x):
        return x + torch.backends.cudnn.benchmark + torch.is_anomaly_enabled() * 10

    return step, [
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.autograd.set_detect_anomaly(True),
    ]


@case
def a_random_number_of_python() -> Case:
    return lambda x: x * 2 + random.random(), [lambda: random.seed(7)]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.startswith("world_")]:
        del sys.modules[name]
    torch.backends.cudnn.benchmark = False
    torch.autograd.set_detect_anomaly(False)


def _run(make: Callable[[], Case], compiled: bool) -> list[Any]:
    random.seed(0)
    step, changes = make()
    run = sidefx_train.compile(step, backend="eager") if compiled else step
    found = []
    for change in (lambda: None, *changes):
        change()
        for _ in range(2):
            found.append(run(torch.ones(2)).tolist())
    for undo in (torch.autograd.set_detect_anomaly, lambda off: setattr(torch.backends.cudnn, "benchmark", off)):
        undo(False)
    if compiled:
        report = run.report()
        assert report.replays == report.calls, f"every call is replayed, in parts at least: {report}"
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_changed_object_fails_its_guard(name: str) -> None:
    want = _run(CASES[name], compiled=False)
    assert _run(CASES[name], compiled=True) == want


def test_other_registrations_do_not_matter() -> None:
    step, (register,) = registered_with_another()
    compiled = sidefx_train.compile(step, backend="eager")
    compiled(torch.ones(2))
    register()
    compiled(torch.ones(2))
    assert not compiled.report().recaptures


def test_a_stopped_capture_guards_the_code_it_ran() -> None:
    """A stopped capture is stored with guards, which cover the code and the defaults of the functions that ran."""

    def helper(value, key="a", *, by="b"):
        raise ValueError([*torch.ones(1).tolist()] and globals())  # a whole namespace stops the capture

    def step(x):
        try:
            helper(x)
        except ValueError:
            return {**vars(Thing)} and x
        return x + 1

    compiled = sidefx_train.compile(step, backend="eager")
    compiled(torch.ones(2))
    helper.__code__ = (lambda value, key="a", *, by="b": value).__code__
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0))
    report = compiled.report()
    assert report.replays >= 1, report


def test_subclasses_and_flags_of_a_class():
    class Base(torch.nn.ModuleDict, collections.abc.MutableMapping): ...

    is_mapping = 1 << 6

    def program(x):
        return x * (2 if Base.__flags__ & is_mapping else 3), Base.__subclasses__()

    step = sidefx_train.compile(program, backend="eager", fullgraph=True)
    for count in range(3):
        value, found = step(torch.ones(1))
        expected, known = program(torch.ones(1))
        assert torch.equal(value, expected) and found == known and len(found) == count
        Base.__bool__ = Base.__len__ = lambda self: 1  # torch and Python forget what they know of the class
        del Base.__bool__, Base.__len__
        globals()[f"Derived{count}"] = type(f"Derived{count}", (Base,), {})
    assert len(step.report().captures) == 3


def test_name_of_the_class_of_an_object():
    class Config: ...

    config = Config()

    def program(x):
        return x * {"Config": 2, "Renamed": 3}[type(config).__name__], config.__class__.__qualname__

    step = sidefx_train.compile(program, backend="eager", fullgraph=True)
    for name in ("Config", "Renamed", "Config"):
        Config.__name__ = name
        Config.__qualname__ = f"{name} again"
        for _ in range(2):
            assert step(torch.ones(())) == program(torch.ones(()))
