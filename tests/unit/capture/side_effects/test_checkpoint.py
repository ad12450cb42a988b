"""Side effects in the middle of a capture: compared, copied, rolled back, pruned."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sidefx_train.compile.capture.recording.tracer import GraphTracer
from sidefx_train.compile.capture.side_effects.collect import collect, observe
from sidefx_train.compile.capture.side_effects.compare import difference
from sidefx_train.compile.capture.side_effects.effect import SideEffects
from sidefx_train.compile.capture.world.trace_world import TraceWorld
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.errors import Unsupported


class Plain:
    """An instance of a user class."""


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("__hidden", "count", "late")

    def __init__(self) -> None:
        self.count = 0
        self.__hidden = 0

    def hide(self, value: object) -> None:
        self.__hidden = value


def mark() -> None:
    """Called by the step; the test then saves the effects so far."""


def back(index: int) -> None:
    """Called by the step; the test then returns to the effects saved as number ``index``."""


TOTAL = 0


@contextmanager
def traced() -> Iterator[tuple[TraceWorld, list[SideEffects]]]:
    """Yields a capture in which ``mark`` and ``back`` work."""
    tracer = GraphTracer()
    world = TraceWorld(tracer)
    taken: list[SideEffects] = []
    registry.INTERCEPTORS[mark] = lambda world, args, kwargs: taken.append(observe(world))
    registry.INTERCEPTORS[back] = lambda world, args, kwargs: taken[args[0]].rollback()
    try:
        with tracer.active():
            yield world, taken
    finally:
        del registry.INTERCEPTORS[mark], registry.INTERCEPTORS[back]


def run(step: Callable[..., Any], *args: Any) -> tuple[Any, list[str], list[SideEffects]]:
    """Captures ``step(*args)``; returns its result, its effects as text, and the effects saved at each ``mark``."""
    with traced() as (world, taken):
        heap = world.heap
        target = heap.shadow(step, heap.sources.const(step, "step"))
        shadows = tuple(heap.shadow(value, heap.sources.arg(index)) for index, value in enumerate(args))
        returned = world.interp.run(target, shadows)
        return returned, collect(world).describe(), taken


def differences(step: Callable[..., Any], *args: Any) -> str:
    """Returns ``diff`` of the effects at marks 1 and 2; the step returns to mark 0 in between."""
    _, _, taken = run(step, *args)
    return difference(taken[1], taken[2])


def owner() -> Plain:
    made = Plain()
    made.n, made.items, made.table = 0, [1, 2], {"a": 1, "b": 2}
    made.names, made.recent = {"x"}, collections.deque([1], maxlen=2)
    made.slotted, made.ordered = Slotted(), collections.OrderedDict(a=1, b=2)
    return made


CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda o: setattr(o, "n", 5),
    "new attribute": lambda o: setattr(o, "other", []),
    "deleted attribute": lambda o: delattr(o, "n"),
    "append to an unread list": lambda o: o.items.append(3),
    "list": lambda o: o.items.__setitem__(0, 7),
    "sorted list": lambda o: o.items.sort(reverse=True),
    "dict entry": lambda o: o.table.__setitem__("c", 1),
    "dict deletion": lambda o: o.table.pop("a"),
    "dict order": lambda o: o.table.update(a=o.table.pop("a")),
    "moved entry": lambda o: o.ordered.move_to_end("a"),
    "set": lambda o: o.names.add("y"),
    "set read": lambda o: o.names.discard("x"),
    "deque": lambda o: o.recent.append(4),
    "slot": lambda o: setattr(o.slotted, "count", 3),
    "unset slot": lambda o: setattr(o.slotted, "late", 3),
    "deleted slot": lambda o: delattr(o.slotted, "count"),
    "private slot": lambda o: o.slotted.hide([1]),
    "print": lambda o: print("n", o.n),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("read", [False, True], ids=["fresh", "read"])
def test_rollback_takes_every_kind_of_change_back(name: str, read: bool) -> None:
    change = CHANGES[name]

    def look(o: Any) -> Any:
        return o.n, list(o.items), list(o.table.items()), sorted(o.names), list(o.recent), o.slotted.count, [*o.ordered]

    def step(o: Any) -> Any:
        if read:
            look(o)
        mark()
        change(o)
        mark()
        back(0)
        return look(o)

    o = owner()
    before = look(o)
    returned, described, taken = run(step, o)
    assert returned == before, f"{name}: the step sees {returned}"
    assert described == [], f"{name}: still {described}"
    assert taken[1].describe() or taken[1].calls, f"{name}: the change was no effect"
    assert difference(taken[0], taken[1]), f"{name}: no difference seen"
    assert look(o) == before, "the real object was changed"


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_a_rollback_count_again(name: str) -> None:
    change = CHANGES[name]

    def step(o: Any) -> None:
        mark()
        change(o)
        mark()
        back(0)
        change(o)
        mark()

    _, described, taken = run(step, owner())
    assert difference(taken[1], taken[2]) == "", f"{name}: {difference(taken[1], taken[2])}"
    assert described == taken[1].describe(), f"{name}: {described}"


def test_equal_branches_with_new_objects() -> None:
    def step(o: Any) -> None:
        mark()
        inner = ["x"]
        o.pair = [inner, inner, {"o": o}]
        mark()
        back(0)
        again = ["x"]
        o.pair = [again, again, {"o": o}]
        mark()

    assert differences(step, owner()) == "", "equal structures made twice differ"


def test_sharing_is_a_difference() -> None:
    def step(o: Any) -> None:
        mark()
        inner = ["x"]
        o.pair = [inner, inner]
        mark()
        back(0)
        o.pair = [["x"], ["x"]]
        mark()

    assert "refers to another list" in differences(step, owner()), "two lists passed for one"


def test_diff_says_what_and_where() -> None:
    def step(o: Any) -> None:
        mark()
        o.n = 1
        o.table["c"] = [1, 2]
        mark()
        back(0)
        o.n = "one"
        o.items.append(9)
        o.table["c"] = [1, 3]
        mark()

    found = differences(step, owner()).splitlines()
    assert sorted(found) == [
        "args[0].n: 1, then 'one'",
        "args[0].table['c'][1]: 2, then 3",
        "only the second appends 1 to args[0].items",
    ], found


def test_tensors_differ_unless_declared_equal() -> None:
    def step(o: Any, x: Any) -> None:
        mark()
        o.loss = x + 1
        mark()
        back(0)
        o.loss = x * 2
        mark()

    _, _, taken = run(step, owner(), torch.ones(2))
    assert difference(taken[1], taken[2]) == "args[0].loss: another tensor of shape (2,)"
    assert difference(taken[1], taken[2], same_tensor=lambda a, b: a.shape == b.shape) == ""


def test_objects_made_before_the_mark_come_back() -> None:
    def step() -> Any:
        made, count = [1], 0
        later = [made, {"k": made}]

        def bump() -> None:
            nonlocal count
            count += 1

        mark()
        made.append(2)
        later[1]["other"] = made
        bump()
        mark()
        back(0)
        return made, later, count, later[0] is made

    returned, _, taken = run(step)
    assert returned == ([1], [[1], {"k": [1]}], 0, True), returned
    assert difference(taken[0], taken[1]), "changes to objects made in the step were not seen"


def test_variables_and_generators_come_back() -> None:
    def numbers() -> Any:
        n = 0
        while True:
            yield n
            n += 1

    def step() -> Any:
        source, x = numbers(), 1
        next(source)
        mark()
        x = [next(source), next(source)]
        back(0)
        return x, next(source)

    returned, _, _ = run(step)
    assert returned == (1, 1), returned


def test_cells_globals_classes_and_gradients_come_back() -> None:
    value = 1

    class Counted:
        total = 0

    def step(p: Any) -> Any:
        global TOTAL
        nonlocal value
        mark()
        value = 2
        TOTAL = 5
        Counted.total = 3
        p.grad = torch.ones(2)
        p.requires_grad_(False)
        mark()
        back(0)
        return value, TOTAL, Counted.total, p.grad is None, p.requires_grad

    p = torch.nn.Parameter(torch.ones(2))
    returned, described, taken = run(step, p)
    assert returned == (1, 0, 0, True, True) and described == [], f"{returned} {described}"
    kinds = sorted(change.kind for change in taken[1].changes)
    assert kinds == ["set_cell", "set_class_attr", "set_grad", "set_item", "set_requires_grad"], kinds
    assert p.grad is None and p.requires_grad and TOTAL == 0 and Counted.total == 0, "the real world was changed"


def test_objects_first_seen_after_the_mark() -> None:
    def step(o: Any) -> Any:
        mark()
        o.items.append(3)
        o.table.pop("b")
        o.slotted.count = 8
        back(0)
        return list(o.items), dict(o.table), o.slotted.count

    returned, described, _ = run(step, owner())
    assert returned == ([1, 2], {"a": 1, "b": 2}, 0) and described == [], f"{returned} {described}"


def test_a_tensor_changed_in_place_cannot_be_taken_back() -> None:
    def step(x: Any) -> None:
        mark()
        x.add_(1)
        back(0)

    x = torch.zeros(2)
    with pytest.raises(Unsupported, match="in-place"):
        run(step, x)
    assert x.eq(0).all(), "the real tensor was changed"


def test_clone_is_independent() -> None:
    def step(o: Any) -> None:
        kept = {"of": o}
        o.n = 1
        mark()
        kept["more"] = 1
        o.n = 2
        mark()

    _, _, taken = run(step, owner())
    copied = taken[0].clone()
    assert difference(copied, taken[0]) == "", "a clone differs from its original"
    copied.changes.clear()
    copied.prune()
    assert taken[0].describe() == ["sets args[0].n"], "clearing a clone cleared the original"
    assert taken[0].made(), "pruning a clone pruned the original"
    assert "1, then 2" in difference(taken[0], taken[1]), difference(taken[0], taken[1])


def test_prune_forgets_what_nothing_live_reaches() -> None:
    def step(o: Any) -> Any:
        dead = [["never", "used"]]  # noqa: F841 - it is dead on purpose
        kept = {"kept": []}
        returned = [kept]
        o.made = kept
        mark()
        return returned

    returned, _, (effects,) = run(step, owner())
    made = effects.made()
    assert len(made) == 5, made
    assert effects.prune([returned]) >= 2
    assert [type(value) for value in effects.made()] == [dict, list, list], effects.made()
    assert effects.prune([returned]) == 0, "a second pruning found more"
    effects.prune()
    assert [type(value) for value in effects.made()] == [dict, list], "what an effect writes is live, the rest is not"


def test_effects_of_a_finished_step_cannot_be_returned_to() -> None:
    with traced() as (world, _):
        effects = collect(world)
    with pytest.raises(ValueError, match="observe"):
        effects.rollback()
