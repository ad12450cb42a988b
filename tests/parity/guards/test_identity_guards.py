"""Object identity: steps that depend on it are not replayed for one object where there were two.

After a break everything is an argument, so each body runs over arguments and over objects found after a break.
"""

from __future__ import annotations

import copy
import operator
import os
import weakref
from typing import Any

import pytest
import torch

import sidefx_train


class Plain:
    def __init__(self, n: int) -> None:
        self.n = n
        self.items = [1]
        self.tensor = torch.ones(1)

    def method(self) -> int:
        return self.n


class Valued(Plain):
    def __eq__(self, other):
        return isinstance(other, Valued) and self.n == other.n

    def __hash__(self):
        return hash(self.n)


class World:
    def __init__(self, cls: type) -> None:
        self.objects = [cls(number // 3) for number in range(4)]
        self.objects[3].tensor = self.objects[0].tensor
        first, second = self.objects[:2]
        self.list = [first, second]
        self.dict: dict[Any, Any] = {first: 1, (second, 1): 2}
        self.set = {second}
        self.weak = weakref.WeakKeyDictionary({first: 1})
        self.weak_set = weakref.WeakSet([first])
        self.ref = weakref.ref(first)
        self.a = self.c = first
        self.got: Any = None

    def state(self) -> Any:
        numbers = {id(obj): number for number, obj in enumerate(self.objects)}

        def of(key: Any) -> Any:
            return tuple(map(of, key)) if isinstance(key, tuple) else numbers.get(id(key), key)

        weak = sorted(numbers[id(key)] for key in self.weak), sorted(numbers[id(key)] for key in self.weak_set)
        pairs = [(of(key), repr(value)) for key, value in self.dict.items()]
        sets = sorted(of(key) for key in self.set)
        return self.got, [of(obj) for obj in self.list], pairs, sets, weak, [obj.items for obj in self.objects]


def removed(world: World, a: Any) -> Any:
    try:
        world.list.remove(a)
    except ValueError as error:
        return str(error)
    world.list.append(a)
    return len(world.list)


def popped(world: World, a: Any) -> Any:
    try:
        del world.dict[a]
    except KeyError:
        return "no such key"
    return len(world.dict)


def matched(a: Any, c: Any) -> str:
    match a:
        case same if same is c:
            return "one"
        case _:
            return "two"


def stored_and_read(world: World, a: Any, c: Any) -> Any:
    world.dict[a] = 5
    return world.dict.get(c, 0)


def added_and_dropped(world: World, a: Any, c: Any) -> int:
    world.set.add(a)
    world.set.discard(c)
    return len(world.set)


def written(a: Any, c: Any) -> int:
    a.items.append(1)
    return len(c.items)


BODIES = {
    "is": lambda world, a, c: a is c,
    "is_of_operator": lambda world, a, c: operator.is_(a, c),
    "eq": lambda world, a, c: a == c,
    "ne": lambda world, a, c: a != c,
    "in_list": lambda world, a, c: a in world.list,
    "index": lambda world, a, c: world.list.index(a) if a in world.list else -1,
    "count": lambda world, a, c: world.list.count(a),
    "remove": lambda world, a, c: removed(world, a),
    "tuples": lambda world, a, c: (a, 1) == (c, 1),
    "lists": lambda world, a, c: [a] == [c],
    "dicts": lambda world, a, c: {"k": a} == {"k": c},
    "new_set": lambda world, a, c: len({a, c}),
    "new_dict": lambda world, a, c: len({a: 1, c: 2}),
    "new_frozenset": lambda world, a, c: len(frozenset([a, c])),
    "hash": lambda world, a, c: hash(a) == hash(c),
    "id": lambda world, a, c: (id(a) == id(c), len({id(a): 1, id(c): 2}), id(a) == id(world.objects[0])),
    "methods": lambda world, a, c: a.method == c.method,
    "any": lambda world, a, c: any(each is a for each in world.list),
    "match": lambda world, a, c: matched(a, c),
    "tensors": lambda world, a, c: a.tensor is c.tensor,
    "attributes": lambda world, a, c: a.items is c.items,
    "written": lambda world, a, c: written(a, c),
    "get": lambda world, a, c: world.dict.get(a, 0),
    "in_dict": lambda world, a, c: a in world.dict,
    "tuple_key": lambda world, a, c: world.dict.get((a, 1), 0),
    "store": lambda world, a, c: world.dict.__setitem__(a, 3),
    "store_and_read": stored_and_read,
    "setdefault": lambda world, a, c: world.dict.setdefault(a, 7),
    "delete": lambda world, a, c: popped(world, a),
    "pop": lambda world, a, c: world.dict.pop(a, 0),
    "keys": lambda world, a, c: [key is a for key in world.dict],
    "in_set": lambda world, a, c: (a in world.set, c in world.set),
    "add": lambda world, a, c: world.set.add(a),
    "add_and_discard": added_and_dropped,
    "difference": lambda world, a, c: len(world.set - {a}),
    "subset": lambda world, a, c: {a} <= world.set,
    "weak_get": lambda world, a, c: world.weak.get(a, 2),
    "weak_in": lambda world, a, c: a in world.weak,
    "weak_store": lambda world, a, c: world.weak.__setitem__(a, 9),
    "weak_pop": lambda world, a, c: world.weak.pop(a, None),
    "weak_set_in": lambda world, a, c: a in world.weak_set,
    "weak_set_add": lambda world, a, c: world.weak_set.add(a),
    "weak_keys": lambda world, a, c: [key.n for key in world.weak],
    "ref": lambda world, a, c: world.ref() is a,
    "refs": lambda world, a, c: weakref.ref(a) == weakref.ref(c),
}
ORDER = [(0, 1), (0, 0), (2, 1), (1, 1), (3, 0), (0, 3), (2, 0)]


def run(world: World, body: Any, behind_a_break: bool, backend: str | None) -> list[Any]:
    def step(x, a, c):
        if behind_a_break:
            os.times()
            world.got = body(world, world.a, world.c)
        else:
            world.got = body(world, a, c)
        return x + 1

    fn = step if backend is None else sidefx_train.compile(step, backend=backend)
    states = []
    for a, c in ORDER:
        world.a, world.c = world.objects[a], world.objects[c]
        fn(torch.ones(2), world.a, world.c)
        states.append(repr(world.state()))
    return states


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize(("cls", "behind_a_break"), [(Plain, False), (Plain, True), (Valued, True)])
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.covering(1)
def test_objects_that_are_one_or_two(name, cls, behind_a_break):
    want = run(World(cls), BODIES[name], behind_a_break, None)
    assert run(World(cls), BODIES[name], behind_a_break, "eager") == want


@pytest.mark.parametrize("name", ["weak_get", "weak_set_in", "weak_keys", "in_set", "add_and_discard"])
def test_keys_with_a_hash_of_their_own_are_captured(name):
    world = World(Valued)

    def step(x):
        world.got = BODIES[name](world, world.a, world.c)
        return x + 1

    captured = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for _ in range(3):
        captured(torch.ones(2))
    assert captured.report().replays == 3, str(captured.report())


def test_an_address_that_a_library_keeps():
    """A library's ``id()`` equals that of the outside object too: keys that it stores are valid after the step."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(x):
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(optimizer)
        return id(optimizer)

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    scaler.scale(torch.ones(()))
    for _ in range(3):
        assert compiled(torch.ones(1, 2)) == id(optimizer)
        assert list(scaler._per_optimizer_states) == [id(optimizer)]
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_addresses_in_a_memo_agree():
    """``copy`` and a class's ``__deepcopy__`` find each other's entries."""

    class Node:
        def __init__(self):
            self.child = None
            self.parent = None

        def __deepcopy__(self, memo):
            made = Node()
            memo[id(self)] = made
            made.child, made.parent = copy.deepcopy(self.child, memo), copy.deepcopy(self.parent, memo)
            return made

    root = Node()
    root.child = Node()
    root.child.parent = root

    def step(x):
        made = copy.deepcopy(root)
        return made.child.parent is made, made is not root, x + 1

    compiled = sidefx_train.compile(step, backend="eager")
    for _ in range(2):
        assert compiled(torch.ones(1))[:2] == step(torch.ones(1))[:2] == (True, True)
