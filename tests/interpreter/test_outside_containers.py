"""Containers that exist before the step, run in three ways."""

from __future__ import annotations

import collections
import copy

import pytest

from tests.support.interpreter_compiled import cases, check_case


def case_unpacking_and_slices():
    items = [1, 2, 3, 4]
    table = {"a": 1}

    def body():
        first, *middle, last = items
        items[1:3] = [first + last]
        items[::2] = [0] * len(items[::2])
        table.update({**table, "b": len(items)}, c=3)
        (x, (y, *z)), w = (1, (2, 3, 4)), {*middle, 5}
        del items[-1]
        items.extend([8, 9])
        return first, middle, last, x, y, z, w, items[::-1], [*items, *table], {**table, "d": 1}

    return body, (items, table)


def case_collections_module():
    counter, ordered = collections.Counter("aab"), collections.OrderedDict(a=1, b=2)
    chain = collections.ChainMap({"x": 1}, {"x": 2, "y": 3})
    queue = collections.deque([1, 2, 3], maxlen=3)
    groups = collections.defaultdict(list)

    def body():
        counter.update("bc")
        ordered.move_to_end("a")
        queue.append(len(queue))
        queue.rotate(1)
        groups[len(groups) % 2].append(counter["a"])
        chain["z"] = chain["x"] + chain["y"]
        return counter.most_common(1), list(ordered), list(queue), dict(groups), dict(chain), counter + counter

    return body, (counter, ordered, queue, groups, chain.maps)


def case_user_containers():
    class Bag(collections.UserDict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value * 2)

    class Stack(list):
        def push(self, item):
            self.append(item)
            return len(self)

    class Names(set):
        def add(self, item):
            super().add(item.lower())

    bag, stack, names = Bag(a=1), Stack([0]), Names(["x"])

    def body():
        bag["n"] = len(stack)
        names.add("ABC")
        return stack.push(5), dict(bag), sorted(names), stack[-1], "n" in bag

    return body, (bag, stack, names)


def case_copies():
    class Node:
        def __init__(self, value, parts):
            self.value, self.parts = value, parts

        def __copy__(self):
            return Node(self.value, self.parts)

    node = Node(1, [Node(2, [])])
    table = {"a": [1]}

    def body():
        shallow, deep, plain = copy.copy(node), copy.deepcopy(table), copy.copy(table)
        deep["a"].append(2)
        shallow.parts.append(3)
        return len(node.parts), table, plain["a"] is table["a"], deep

    return body, (node, table)


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__.removeprefix("case_"))
def test_three_ways(case):
    check_case(case)
