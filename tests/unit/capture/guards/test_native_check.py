"""Guards on held objects: the native program, the generated Python, and the slow path agree after every change."""

from __future__ import annotations

import gc
import types
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sidefx_train.compile.api import compile_step
from sidefx_train.compile.capture.guards import native_check
from sidefx_train.compile.capture.guards.definition_guards import FunctionFacts, NamespaceFacts
from sidefx_train.compile.capture.guards.guard import Guard, TensorFacts
from sidefx_train.compile.capture.guards.python_check import failing
from sidefx_train.compile.capture.guards.source import Source, SourceTable
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.native import guards_module
from sidefx_train.compile.native.guards.guard_program import LOADS, TESTS


class Thing:
    limit = 3

    def __init__(self) -> None:
        self.flag = True
        self.name = "thing"
        self.ratio = 0.5
        self.table: dict[Any, Any] = {"a": 1, "b": [1, 2, 3]}
        self.ordered: OrderedDict[str, int] = OrderedDict()
        self.counts: defaultdict[str, int] = defaultdict(int, x=1)
        self.items = [Slotted(), Slotted()]
        self.parts = [Plain(), Plain(), Plain()]
        self.numbered = {0: self.parts[0], 1: self.parts[1]}
        self.spare: list[Any] = [{}, {}, {}]
        self.log: dict[str, int] = {}
        self.counter = Counter(seen=1)
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))
        self.state = {self.weight: {"step": torch.zeros(()), "avg": torch.zeros(2, 3)}}
        self.base = type("Kind", (Plain,), {"limit": 3})
        self.kind = type("Kind", (self.base,), {"run": _no_hook})
        self.space = {"run": _no_hook, "n": 1, "__name__": "space"}
        self.function = _function()


class Plain:
    pass


class OtherPlain:
    pass


def _function() -> Any:
    def function(a: int = 1, *, b: int = 2, c: int = 3) -> int:
        return a + b + c

    return function


class Slotted:
    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner = "value"


def taken(space: Any, *names: str) -> NamespaceFacts:
    entries = vars(space) if isinstance(space, type) else space
    mro = space.__mro__ if isinstance(space, type) else None
    return NamespaceFacts(names, tuple(entries.get(name, ABSENT) for name in names), mro)


def everything(thing: Thing) -> list[Guard]:
    """Returns guards of every kind on one object."""
    table = SourceTable()
    root = table.const(thing, "thing")

    def attr(name: str) -> Source:
        return table.attr(root, name)

    def tensor(source: Source) -> Guard:
        return Guard("tensor", source, TensorFacts.of(source.fetch((), {})))

    weight = table.const(thing.weight, "thing.weight")
    state = table.item(attr("state"), thing.weight)
    guards = [
        Guard("type", root, Thing),
        Guard("is", attr("flag"), True),
        Guard("equal", attr("name"), "thing"),
        Guard("equal", attr("ratio"), 0.5),
        Guard("absent", root, "forward"),
        Guard("absent", root, "limit"),
        Guard("type", attr("table"), dict),
        Guard("keys", attr("table"), ("a", "b")),
        Guard("equal", table.item(attr("table"), "a"), 1),
        Guard("length", table.item(attr("table"), "b"), 3),
        Guard("equal", table.item(table.item(attr("table"), "b"), 1), 2),
        Guard("length", attr("ordered"), 0),
        Guard("type", attr("counts"), defaultdict),
        Guard("absent", attr("counter"), "extra"),
        Guard("equal", table.item(attr("counts"), "x"), 1),
        Guard("no_item", attr("counts"), "y"),
        Guard("type", table.item(attr("items"), 0), Slotted),
        Guard("equal", table.slot(table.item(attr("items"), 0), "inner"), "value"),
        Guard("type", attr("parts"), list),
        *(Guard("is", table.item(attr("parts"), place), part) for place, part in enumerate(thing.parts)),
        Guard("type", attr("numbered"), dict),
        *(Guard("is", table.item(attr("numbered"), place), part) for place, part in thing.numbered.items()),
        Guard("is", attr("weight"), thing.weight),
        Guard("is", table.slot(weight, "_backward_hooks"), None),
        Guard("is", table.slot(weight, "_post_accumulate_grad_hooks"), None),
        Guard("is", table.grad(weight), None),
        tensor(weight),
        Guard("type", state, dict),
        Guard("length", state, 2),
        Guard("same", table.item(attr("items"), 1), table.item(attr("items"), 1)),
        Guard("names", table.const(thing.kind, "kind"), taken(thing.kind, "run", "limit", "missing")),
        Guard("names", table.const(thing.base, "base"), taken(thing.base, "limit", "missing")),
        Guard("names", table.const(thing.space, "space"), taken(thing.space, "run", "missing")),
        Guard("code", table.const(thing.function, "function"), FunctionFacts.of(thing.function)),
    ]
    spare = [table.item(attr("spare"), place) for place in range(3)]
    guards.append(Guard("all_distinct", spare[0], (*spare, attr("log"))))
    guards.append(Guard("disjoint_sets", root, ((root, attr("table")), (attr("ordered"), attr("counts")))))
    for key in ("step", "avg"):
        held = thing.state[thing.weight][key]
        guards.append(Guard("is", table.item(state, key), held))
        guards.append(tensor(table.const(held, f"state.{key}")))
    return guards


def _no_hook(_: torch.Tensor) -> None:
    return None


CHANGES: dict[str, Callable[[Thing], Any]] = {
    "a flag": lambda t: setattr(t, "flag", False),
    "an equal value of another type": lambda t: setattr(t, "name", type("Name", (str,), {})("thing")),
    "a number": lambda t: setattr(t, "ratio", 0.25),
    "a new attribute": lambda t: setattr(t, "forward", None),
    "an instance attribute over a class attribute": lambda t: setattr(t, "limit", 4),
    "a deleted attribute": lambda t: delattr(t, "ratio"),
    "the class": lambda t: setattr(t, "__class__", type("Other", (Thing,), {})),
    "the instance dict": lambda t: setattr(t, "__dict__", {**vars(t), "flag": 1}),
    "an entry": lambda t: t.table.update(a=2),
    "an added key": lambda t: t.table.update(c=0),
    "the order of keys": lambda t: t.table.update(a=t.table.pop("a")),
    "a longer list": lambda t: t.table["b"].append(4),
    "a list item": lambda t: t.table["b"].__setitem__(1, 7),
    "a filled OrderedDict": lambda t: t.ordered.update(a=1),
    "a missing key": lambda t: t.counts.clear(),
    "a key that was absent": lambda t: t.counts.update(y=0),
    "an attribute of a container": lambda t: setattr(t.counter, "extra", 1),
    "a slot": lambda t: setattr(t.items[0], "inner", "other"),
    "an unset slot": lambda t: delattr(t.items[0], "inner"),
    "a shorter list": lambda t: t.items.clear(),
    "the last of some objects": lambda t: t.parts.__setitem__(2, Plain()),
    "one object less": lambda t: t.parts.pop(),
    "other objects": lambda t: t.parts.reverse(),
    "an object by number": lambda t: t.numbered.update({1: Plain()}),
    "a replaced parameter": lambda t: setattr(t, "weight", torch.nn.Parameter(torch.zeros(2, 3))),
    "two objects that are one": lambda t: t.spare.__setitem__(2, t.spare[0]),
    "an object that is another one": lambda t: setattr(t, "log", t.spare[1]),
    "an object that is one of others": lambda t: setattr(t, "ordered", t.table),
    "a hook": lambda t: t.weight.register_hook(_no_hook),
    "a post-accumulate hook": lambda t: t.weight.register_post_accumulate_grad_hook(_no_hook),
    "a gradient": lambda t: setattr(t.weight, "grad", torch.zeros(2, 3)),
    "requires_grad": lambda t: t.weight.requires_grad_(False),
    "another shape": lambda t: setattr(t.weight, "data", torch.zeros(3, 2)),
    "other strides": lambda t: setattr(t.weight, "data", torch.zeros(3, 2).t()),
    "another dtype": lambda t: setattr(t.weight, "data", torch.zeros(2, 3, dtype=torch.float64)),
    "a state tensor": lambda t: t.state[t.weight].update(avg=torch.zeros(2, 3)),
    "a state tensor's shape": lambda t: t.state[t.weight]["avg"].unsqueeze_(0),
    "a state entry more": lambda t: t.state[t.weight].update(extra=1),
    "no state": lambda t: t.state.clear(),
    "a method": lambda t: setattr(t.kind, "run", None),
    "a deleted method": lambda t: delattr(t.kind, "run"),
    "a new method": lambda t: setattr(t.kind, "missing", None),
    "a method over one of a base": lambda t: setattr(t.kind, "limit", None),
    "a method of a base": lambda t: setattr(t.base, "limit", None),
    "a base": lambda t: setattr(t.base, "__bases__", (OtherPlain,)),
    "a definition of a module": lambda t: t.space.update(run=None),
    "a new definition of a module": lambda t: t.space.update(missing=None),
    "the code of a function": lambda t: setattr(t.function, "__code__", taken.__code__.replace(co_freevars=())),
    "the defaults of a function": lambda t: setattr(t.function, "__defaults__", (5,)),
    "no defaults": lambda t: setattr(t.function, "__defaults__", None),
    "the keyword defaults of a function": lambda t: setattr(t.function, "__kwdefaults__", {"b": 2, "c": 3}),
    "a keyword default": lambda t: t.function.__kwdefaults__.update(b=5),
    "a keyword default less": lambda t: t.function.__kwdefaults__.pop("b"),
    "state of another class": lambda t: t.state.update({t.weight: OrderedDict(t.state[t.weight])}),
}


def _native() -> Any:
    native = guards_module()
    if native is None:
        pytest.skip("no C++ compiler")
    return native


def _checks(guards: list[Guard]) -> dict[str, Callable[[], bool]]:
    native = _native()
    objects = [guard for guard in guards if guard.kind != "tensor"]
    found = {
        "python": native_check._python_check(guards),
        "native": native.guard_program(native_check.instructions(guards, native.tensors_readable())),
    }
    plain = native.guard_program(native_check.instructions(objects))
    tensors = native_check._python_check([guard for guard in guards if guard.kind == "tensor"])
    found["native, torch's tensors"] = lambda: plain() and tensors()
    return found


def test_tensors_are_readable() -> None:
    """The header ships with torch: on a supported version the fast path must be in use."""
    assert _native().tensors_readable()


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_object_fails_its_guard_in_every_kind_of_check(change: str) -> None:
    thing = Thing()
    guards = everything(thing)
    assert native_check.split(guards) == (guards, [])
    checks = _checks(guards)
    for name, check in checks.items():
        assert [check(), check(), check()] == [True] * 3, name
    CHANGES[change](thing)
    assert any(failing(guard, (), {})[0] for guard in guards), "the change must matter"
    for name, check in checks.items():
        assert [check(), check()] == [False] * 2, name


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_object_fails_its_guard_before_and_after_the_native_module_is_built(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _native()
    there = False
    monkeypatch.setattr(native_check, "guards_ready", lambda: there)
    for changed_early in (True, False):
        there, thing = False, Thing()
        names: dict[str, Any] = {native_check.CHECK: native_check.object_check(everything(thing))}
        native_check.follow(names)
        early = names[native_check.CHECK]
        assert isinstance(early, native_check.UntilBuilt) and early() and names[native_check.CHECK] is early
        if changed_early:
            CHANGES[change](thing)
            assert not early()
            there = True
            assert not early() and names[native_check.CHECK] is early, "a program is made of what the guards hold for"
        else:
            there = True
            assert early() and names[native_check.CHECK] is not early
            assert names[native_check.CHECK]()
            CHANGES[change](thing)
            assert not names[native_check.CHECK]() and not early()


def test_nobody_waits_for_the_guards(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _native()
    there = False
    monkeypatch.setattr(native_check, "guards_ready", lambda: there)
    model = torch.nn.Linear(2, 2)
    step = compile_step(lambda x: model(x).sum().backward(), backend="eager")

    def waiting() -> list[bool]:
        checks = [entry.replay.__globals__[native_check.CHECK] for entry in step._cache.entries]
        return [isinstance(check, native_check.UntilBuilt) for check in checks]

    for _ in range(4):
        step(torch.ones(1, 2))
    assert waiting() and all(waiting())
    there, captures = True, len(step.report().captures)
    step(torch.ones(1, 2))
    assert not all(waiting()), "the entry that is in use calls the program"
    step(torch.ones(1, 2))
    assert len(step.report().captures) == captures
    model.weight = torch.nn.Parameter(torch.ones(2, 2))
    step(torch.ones(1, 2))
    assert len(step.report().captures) == captures + 1, "the program notices what changes"


def test_a_further_parameter_adds_few_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors and their hooks take one instruction, and instructions behind a gate are skipped."""
    _native()
    made: list[Any] = []
    instructions = native_check.instructions
    monkeypatch.setattr(
        native_check, "instructions", lambda *given, **named: made.append(instructions(*given, **named)) or made[-1]
    )

    def run_at_every_call(layers: int) -> int:
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        compiled = compile_step(step, backend="eager", fullgraph=True)
        compiled(torch.ones(1, 2))
        skipped = sum(line[7] for line in made[-1] if LOADS[line[0]] == "gate")
        assert sum(LOADS[line[0]] == "tensors" for line in made[-1]) == 1
        assert not any(LOADS[line[0]] in ("hooks", "late_hooks") for line in made[-1])
        return len(made[-1]) - skipped

    few, many = run_at_every_call(2), run_at_every_call(6)
    assert many - few <= 4 * 13, "a layer has two parameters, each with three state tensors"


def test_what_is_put_back_holds_again() -> None:
    thing = Thing()
    check = _checks(everything(thing))["native"]
    assert check()
    for _ in range(3):
        thing.flag = False
        assert not check()
        thing.flag = True
        assert check()
    thing.table["b"].append(4)
    assert not check()
    thing.table["b"].pop()
    assert check()
    del thing.ratio
    assert not check()
    thing.ratio = 0.5
    assert check()


def test_objects_in_a_list_are_compared_at_once() -> None:
    """A dict with the same keys is read entry by entry, because its entries may be in another order."""
    thing = Thing()
    tests = [TESTS[line[4]] for line in native_check.instructions(everything(thing))]
    assert tests.count("items") == 1
    check = _checks(everything(thing))["native"]
    thing.numbered = dict(reversed(thing.numbered.items()))
    assert check()


def test_other_objects_as_different() -> None:
    thing = Thing()
    guards = [guard for guard in everything(thing) if guard.kind in ("all_distinct", "disjoint_sets")]
    checks = _checks(guards)
    for change in (
        lambda: None,
        lambda: thing.spare.reverse(),
        lambda: thing.spare.__setitem__(0, []),
        lambda: setattr(thing, "log", thing.ordered),
        lambda: setattr(thing, "table", thing.spare[0]),
        lambda: setattr(thing, "ordered", thing.counts),
    ):
        change()
        for name, check in checks.items():
            assert [check(), check()] == [True] * 2, name
    thing.counts = thing.table  # type: ignore[assignment]
    assert not any(check() for check in checks.values())


def test_another_dict_with_the_same_contents() -> None:
    """A gate keeps a dict's identity and version; an equal new dict is read again."""
    thing = Thing()
    check = _checks(everything(thing))["native"]
    assert check()
    thing.table = dict(thing.table)
    assert check()
    thing.table = {"a": 1, "b": [1, 2, 4][:2]}
    assert not check()


def test_other_names_of_a_namespace_do_not_matter() -> None:
    thing = Thing()
    for name, check in _checks(everything(thing)).items():
        assert check(), name
        thing.kind.other = 1
        thing.base.other = 1
        thing.space["n"] = 2
        thing.function.note = 1
        assert [check(), check()] == [True] * 2, name
        thing.space["run"], before = None, thing.space["run"]
        assert not check(), name
        thing.space["run"] = before
        assert check(), name
        del thing.kind.other, thing.base.other


def test_plain_keys_are_compared_by_value() -> None:
    """A dict that is filled again has other key objects, and is the same to eager."""
    thing = Thing()
    thing.table = {(1, "a"): 1, 2.5: 2, b"x" * 3: 3}
    table = SourceTable()
    source = table.attr(table.const(thing, "thing"), "table")
    for check in _checks([Guard("keys", source, tuple(thing.table))]).values():
        assert check()
        thing.table = {tuple([1, "a"]): 1, float("2.5"): 2, bytes([120] * 3): 3}
        assert check()
        thing.table = {(1, "b"): 1, 2.5: 2, b"xxx": 3}
        assert not check()
        thing.table = {(1, "a"): 1, 2.5: 2, b"xxx": 3}


def test_nothing_is_inserted_into_a_defaultdict() -> None:
    thing = Thing()
    check = _checks(everything(thing))["native"]
    thing.counts.clear()
    assert not check()
    assert not thing.counts


def test_inference_mode_is_another_world() -> None:
    thing = Thing()
    check = _checks(everything(thing))["native"]
    assert check()
    with torch.inference_mode():
        assert not check()
    assert check()


def test_a_program_does_not_keep_a_cycle_alive() -> None:
    thing = Thing()
    thing.check = _checks(everything(thing))["native"]  # type: ignore[attr-defined]
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None


def test_references_are_balanced() -> None:
    import sys

    thing = Thing()
    check = _checks(everything(thing))["native"]
    check()
    objects = [thing, thing.weight, thing.table, thing.items, vars(thing), thing.state[thing.weight]]
    before = [sys.getrefcount(o) for o in objects]
    for _ in range(100):
        check()
    thing.flag = False
    for _ in range(100):
        check()
    assert [sys.getrefcount(o) for o in objects] == before


def _function_number(number: int) -> tuple[Guard, Any, dict[str, Any]]:
    function = types.FunctionType((lambda a=1: a).__code__, {}, f"f{number}", (number,))
    return Guard("code", SourceTable().const(function, "function"), FunctionFacts.of(function)), function, {}


def _class_number(number: int) -> tuple[Guard, Any, dict[str, Any]]:
    cls = type(f"C{number}", (), {"run": number})
    return Guard("names", SourceTable().const(cls, "class"), NamespaceFacts(("run",), (number,), cls.__mro__)), cls, {}


def _module_number(number: int) -> tuple[Guard, Any, dict[str, Any]]:
    space = {"run": number}
    return Guard("names", SourceTable().const(space, "module"), NamespaceFacts(("run",), (number,), None)), None, space


@pytest.mark.parametrize("make", [_function_number, _class_number, _module_number])
def test_each_of_many_definitions_counts(make: Callable[[int], tuple[Guard, Any, dict[str, Any]]]) -> None:
    """More definitions than are prefetched; each is changed between two calls, and changed back."""
    definitions = [make(number) for number in range(21)]
    check = _native().guard_program(native_check.instructions([guard for guard, _, _ in definitions]))
    for _, owner, space in definitions:
        assert check() and check()
        name = "__defaults__" if isinstance(owner, types.FunctionType) else "run"
        value = space[name] if owner is None else getattr(owner, name)
        for changed, holds in (((99,), False), (value, True)):
            if owner is None:
                space[name] = changed
            else:
                setattr(owner, name, changed)
            assert check() is holds
