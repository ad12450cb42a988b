"""The order of sets depends on hashes, addresses and earlier operations on a set, and steps see eager's order."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import sidefx_train
from tests.support.call_sequences import course

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")

LAYERS = [torch.nn.Linear(2, 2) for _ in range(7)]
for _number, _layer in enumerate(LAYERS):
    _layer.number = _number


class Item:
    def __init__(self, number: int) -> None:
        self.number = number


ITEMS = [Item(number) for number in range(9)]


def breaks_here() -> None:
    os.times()


def walks_over_a_changed_set(x, log):
    found = {3, 1, 2}
    found.add(10)
    found.discard(3)  # the position of 10 depends on the earlier 3
    for item in found:
        log.append(item)
        breaks_here()
    return x


def changes_what_it_walks_over(x, log):
    found = {1, 2, 3}
    found.add(10)
    for item in found:
        log.append(item)
        breaks_here()
        if item == 2:
            found.add(11)
    return x


def an_iterator_over_a_changed_set(x, log):
    found = {1, 2, 3}
    found.add(10)
    found.discard(1)
    rest = iter(found)
    log.append(next(rest))
    breaks_here()
    log.append(list(rest))
    return x


def hands_a_changed_set_on(x, log):
    found = {3, 1, 2}
    found.add(10)
    found.discard(3)
    breaks_here()
    log.append(list(found))
    return x


def words(x, log):
    found = set()
    for word in ("alpha", "beta", "gamma", "delta", "epsilon"):
        found.add(word)
    found.remove("beta")
    found.add("zeta")
    for word in found:
        breaks_here()
        log.append(word)
    return x


def operators_on_sets(x, log):
    left, right = {1, 9, 17}, {17, 25, 1}
    log.extend(map(list, [left | right, left & right, left ^ right, left - right, right | left, right & left]))
    log.extend([left | right, right | left, frozenset(left) | right, frozenset(right) ^ left])
    return x


def a_set_that_was_large(x, log):
    found = set(range(100))
    for item in range(97):
        found.discard(item)
    found.add(130)
    log.extend([found, list(found)])
    return x


def layers(x, log):
    found = set()
    for layer in LAYERS:
        found.add(layer)
    for layer in found:
        log.append(layer.number)
        x = layer(x)
    return x


def parameters(x, log):
    total = x.sum()
    for parameter in {parameter for layer in LAYERS for parameter in layer.parameters()}:
        log.append([layer.number for layer in LAYERS if parameter is layer.weight or parameter is layer.bias])
        total = total + parameter.abs().sum()
    return total


def objects(x, log):
    found = set(ITEMS)
    log.append([item.number for item in found])
    return x


def only_asks(x, log):
    found = {*LAYERS[:3]} | {*LAYERS[2:4]}
    log.append([layer in found for layer in LAYERS])
    log.append(len(found))
    return x


class Members(set):
    pass


def sets_of_a_subclass(x, log):
    for order in ([1, 9, 5], [9, 1, 5], [5, 13, 1, 9], [13, 5, 21, 2]):
        found = Members(order[:1])
        for item in order[1:]:
            found.add(item)
        log.append(found)
    large = Members(range(100))
    large.difference_update(range(97))
    large.add(130)
    log.append(large)
    return x


STEPS = [
    walks_over_a_changed_set, changes_what_it_walks_over, an_iterator_over_a_changed_set, hands_a_changed_set_on, words,
    operators_on_sets, a_set_that_was_large, layers, parameters, objects, only_asks,
    sets_of_a_subclass,
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.every(2)
def test_sets_made_in_the_step(step: Any) -> None:
    assert course(sidefx_train.compile(step, backend="eager")) == course(step)


def test_sets_that_are_only_asked_are_captured() -> None:
    compiled = sidefx_train.compile(only_asks, backend="eager")
    course(compiled)
    assert not compiled.report().breaks


def removes_and_adds_again() -> Any:
    found = {8, 16, 24}

    def step(x, log):
        log.append(list(found))
        found.discard(8)
        found.add(0)
        found.add(8)
        return x

    return step


def alternates() -> Any:
    found, calls = {8, 16, 24}, [0]

    def step(x, log):
        calls[0] += 1
        log.append(list(found))
        found.discard(min(found))
        found.add(calls[0] * 8 + 64)
        return x

    return step


def empties() -> Any:
    found = {8, 16, 24}

    def step(x, log):
        log.append(list(found))
        found.clear()
        for item in (24, 8, 32, 16):
            found.add(item)
        found.discard(8)
        found.update((40, 8))
        return x

    return step


def walks_over_what_it_changed() -> Any:
    found = {1, 2, 3}

    def step(x, log):
        found.add(len(found) + 50)
        for item in found:
            breaks_here()
            log.append(item)
            if len(found) < 8:
                found.discard(item)
        return x

    return step


@pytest.mark.parametrize("make", [removes_and_adds_again, alternates, empties, walks_over_what_it_changed])
def test_sets_from_outside(make: Any) -> None:
    assert course(sidefx_train.compile(make(), backend="eager"), calls=7) == course(make(), calls=7)


def test_members_are_not_compared():
    """Regression: members were compared by ``==``, which tensors do not answer."""

    def step(found):
        return found.pop() * found.pop(), len(found)

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for i in range(3):
        pair = {torch.full((3,), 2.0), torch.full((3,), float(i))}
        product, left = compiled(pair)
        assert torch.equal(product, torch.full((3,), 2.0 * i)) and left == len(pair) == 0
