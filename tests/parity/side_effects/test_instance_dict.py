"""``vars(obj)`` and ``obj.attribute`` share state, whichever is accessed first, wherever they are stored."""

from __future__ import annotations

import collections
import copy
import dataclasses
import os
import weakref

import pytest
import torch

import sidefx_train
from tests.support.parity import Program, batches, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


class Box:
    def __init__(self, n=0):
        self.n = n
        self.d = {}


class Rows(list):
    def __init__(self, items):
        super().__init__(items)
        self.n = 3


def program(step, owner=Box):
    def make() -> Program:
        box, kept = owner((1, 2)) if owner is Rows else owner(1), []
        return Program(lambda x: step(x, box, vars(box), kept), batches((3,)), (box, vars(box), kept))

    return make


def dict_before_attribute(x, box, space, kept):
    space["n"] += 1
    seen = box.n
    box.n += 5
    space["late"] = space["n"]
    return x * seen, space["n"], box.late


def attribute_before_dict(x, box, space, kept):
    seen = box.n
    space["n"] += 1
    box.n += 5
    return x * seen, space["n"], space is vars(box)


def removed_and_added(x, box, space, kept):
    space.pop("d", None)
    found = hasattr(box, "d")
    box.d = {"again": box.n}
    del space["d"]
    return x * 2, found, hasattr(box, "d"), list(space)


def leaves_the_step(x, box, space, kept):
    kept.append(vars(box))
    kept.append(vars(box).update)
    box.n += 1
    return x * box.n


def of_an_instance_made_inside(x, box, space, kept):
    made = Box(7)
    kept.append(vars(made))
    kept.append(made)
    vars(made)["extra"] = x.sum()
    kept[-2]["itself"] = made
    return x * 2


def of_an_instance_that_only_its_dict_keeps(x, box, space, kept):
    made = Box(7)
    made.n += 1
    kept.append(vars(made))
    return x * 2


STEPS = [
    dict_before_attribute,
    attribute_before_dict,
    removed_and_added,
    leaves_the_step,
    of_an_instance_made_inside,
    of_an_instance_that_only_its_dict_keeps,
]


@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_whole_steps(step):
    parity(program(step), steps=4, captures=None)


@pytest.mark.parametrize("step", STEPS[:4], ids=lambda f: f.__name__)
def test_a_list_with_attributes(step):
    def made(x, box, space, kept):
        space.setdefault("d", 1)
        return step(x, box, space, kept)

    parity(program(made, Rows), steps=4, captures=None)


def test_held_over_a_break():
    def step(x, box, space, kept):
        held, put = vars(box), box.__dict__.update
        high = bool(x.mean() > 0)
        held["high"] = high
        box.n += 1
        put(more=held["n"], **{"low": not high})
        vars(box).update(extra=3, last=int(bool(x.sum() > 1)))
        return box.high, box.more, held is space

    report = parity(program(step), steps=6, captures=None, whole=False)
    assert not report.fallbacks, report.fallbacks


def test_a_dict_becomes_that_of_an_instance():
    box = Box(1)

    def step(x, d):
        d["n"] += 1
        seen = box.n
        box.n = seen + 10
        return x * d["n"]

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise")
    x = torch.ones(2)
    assert compiled(x, {"n": 4})[0] == 5, "another dict"
    assert box.n == 11
    assert compiled(x, vars(box))[0] == 22, "its own: 11 + 1, then + 10"
    assert box.n == 22
    assert compiled(x, {"n": 4})[0] == 5, "another dict again"
    assert box.n == 32


class Counting(dict):
    looked = 0

    def __missing__(self, key):
        Counting.looked += 1
        return 0


def test_guards_make_no_default():
    compiled = sidefx_train.compile(lambda x, d, flag: x * d["a"][0] if flag else x, backend="eager")
    table = collections.defaultdict(lambda: [3], a=[2])
    x = torch.ones(2)
    assert torch.equal(compiled(x, table, True), x * 2)
    del table["a"]
    assert torch.equal(compiled(x, table, False), x)
    assert not table
    assert torch.equal(compiled(x, table, True), x * 3)
    assert table == {"a": [3]}


def test_guards_do_not_run_missing():
    compiled = sidefx_train.compile(lambda x, d, flag: x * d["a"] if flag else x, backend="eager")
    table = Counting(a=2)
    x = torch.ones(2)
    assert torch.equal(compiled(x, table, True), x * 2)
    del table["a"]
    assert torch.equal(compiled(x, table, False), x)
    assert Counting.looked == 0


def test_a_failed_capture_creates_no_optimizer_state():
    model = torch.nn.Linear(3, 2)
    opt = torch.optim.Adam(model.parameters())

    def step(x):
        model(x).sum().backward()
        if len(opt.state) > 5:  # what the step itself has read changes when its state is created early
            return
        raise_it(x)
        opt.step()

    def raise_it(x):
        torch.linalg.cholesky(-x.t() @ x)

    compiled = sidefx_train.compile(step, backend="eager")
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.randn(4, 3))
    assert not opt.state


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
def test_a_dict_that_leads_back_to_its_object():
    """After a break the ``__dict__`` may be visited before its object, to which a weak reference in it refers."""

    class Owner:
        pass

    def course(compiled):
        owner = Owner()
        owner.kept = {"a": 1}

        def step(x):
            vars(owner).update(now=len(os.times()) > 0, count=len(owner.kept))
            owner.itself = weakref.ref(owner)
            return x * owner.count

        run = sidefx_train.compile(step, backend="eager") if compiled else step
        results = [(run(torch.ones(2)).tolist(), list(vars(owner)), owner.itself() is owner) for _ in range(4)]
        return results, run

    (have, compiled), (want, _) = course(True), course(False)
    assert have == want
    assert "SFX204" not in [record.code for record in compiled.report().fallbacks], compiled.report()


@dataclasses.dataclass
class Named:
    scale: float = 2.0
    name: str = ""
    seen: list = dataclasses.field(default_factory=list)


def _replaced(state):
    made = dataclasses.replace(state, scale=3.0)
    return made.scale, made.name


def _copied(state):
    made = copy.copy(state)
    made.scale += 1
    return made.scale, made.name, made.seen is state.seen


def _updated(state):
    state.__dict__.update(scale=state.scale + 1)
    return state.scale


WHOLE = {
    "item": lambda state: vars(state)["scale"],
    "items": lambda state: [value for name, value in vars(state).items() if name == "scale"][0],
    "copied dict": lambda state: dict(vars(state), scale=4.0)["scale"],
    "union": lambda state: (vars(state) | {"scale": 5.0})["scale"],
    "keyword arguments": lambda state: (lambda scale, **_: scale)(**vars(state)),
    "replaced": _replaced,
    "copied": _copied,
    "updated": _updated,
    "asdict": lambda state: dataclasses.asdict(state, dict_factory=dict)["name"],
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("bound", [False, True], ids=["argument", "self"])
def test_what_is_not_read_may_change(name, bound):
    """A string that differs and a list that grows at every call."""
    read = WHOLE[name]
    grows = name != "asdict"  # which copies the list

    class Step(Named):
        def __call__(self, x):
            found = read(self)
            return (
                (x * found[0], *found[1:]) if isinstance(found, tuple) else found if type(found) is str else x * found
            )

    def history(fn, state):
        found = []
        for index in range(8):
            state.name = f"batch {index}"
            if grows:
                state.seen.append(index)
            found.append((fn(torch.ones(2)) if bound else fn(state, torch.ones(2)), dict(vars(state)), len(state.seen)))
        return repr(found)

    plain, captured = Step(), Step()
    compiled = sidefx_train.compile(captured.__call__ if bound else Step.__call__, backend="eager")
    assert history(compiled, captured) == history(plain.__call__ if bound else Step.__call__, plain)
    report = compiled.report()
    assert len(report.captures) <= 4 and not report.breaks and not report.fallbacks, str(report)


def test_what_is_read_of_a_whole_dict_is_guarded():
    class State:
        pass

    def step(state, x):
        return x * len(dict(vars(state))["name"]) if "n" not in vars(state) else x * list(vars(state).values())[0]

    def history(fn):
        state, found = State(), []
        for name in ["a", "bb", "ccc", "a", "dddd"]:
            state.name = name
            found.append(fn(state, torch.ones(2)).tolist())
        del state.name
        state.n = 5
        found.append(fn(state, torch.ones(2)).tolist())
        state.name = "z"
        return [*found, fn(state, torch.ones(2)).tolist()]

    assert history(sidefx_train.compile(step, backend="eager")) == history(step)


def test_whether_two_strings_are_one_object():
    class State:
        pass

    state = State()

    def step(x):
        y = x * 2 if state.name is state.other else x
        return y if state.name is not None else x * 3

    compiled, shared = sidefx_train.compile(step, backend="eager"), "".join(["s", "hared"])
    pairs = [(f"a{index}", f"b{index}") for index in range(4)]
    for pair in [*pairs, (shared, shared), ("u", "v"), (shared, shared), (None, None), (None, "r"), (shared, shared)]:
        state.name, state.other = pair
        assert compiled(torch.ones(2)).equal(step(torch.ones(2)))
