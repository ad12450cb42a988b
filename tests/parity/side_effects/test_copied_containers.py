"""Copies of outside containers that have attributes, and ``dir`` of outside objects: C code reads all attributes."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from torch import nn

import sidefx_train
from tests.support.parity import Program, parity


class Items(list):
    pass


class Slotted(list):
    __slots__ = ("__dict__", "first")


class Named:
    def __init__(self) -> None:
        self.name = "a"


def with_attributes(container: Any) -> Any:
    container.note = ["kept"]
    return container


MADE = {
    "list": lambda: with_attributes(Items([1, [2]])),
    "slots": lambda: with_attributes(Slotted([1])),
    "dict": lambda: with_attributes(type("Mapping", (dict,), {})(a=1)),
    "OrderedDict": lambda: with_attributes(OrderedDict(a=1)),
    "set": lambda: with_attributes(type("Members", (set,), {})([1])),
    "deque": lambda: with_attributes(type("Queue", (deque,), {})([1, 2], 3)),
    "Counter": lambda: with_attributes(type("Counts", (Counter,), {})("aab")),
    "defaultdict": lambda: with_attributes(type("Lists", (defaultdict,), {})(list, a=[1])),
    "state dict": lambda: nn.Linear(2, 2).state_dict(),
}


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        parts: Any = {key: described(item) for key, item in value.items()}
    elif isinstance(value, (list, deque, set)):
        parts = [described(item) for item in value]
    else:
        return value
    own = getattr(value, "__dict__", {})
    return type(value).__name__, parts, {name: described(item) for name, item in own.items()}


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda value: list(map(described, value.__reduce_ex__(4)[2:3]))]
)
@pytest.mark.parametrize("kind", list(MADE))
def test_a_copy_has_the_attributes(kind, copied):
    """Regression: a copy of a state dict from before the step had no ``_metadata``, and a copied list no attributes."""

    def make() -> Program:
        container = MADE[kind]()
        seen: list[object] = []

        def step(x: torch.Tensor) -> torch.Tensor:
            seen.append(described(copied(container)))
            return x + 1

        return Program(step, lambda i: (torch.ones(2),), (seen,))

    parity(make)


def test_an_attribute_of_the_step_is_copied():
    items = MADE["list"]()

    def step(x: torch.Tensor) -> tuple[torch.Tensor, list]:
        items.note = ["new"]
        items.count = 1
        made = copy.copy(items)
        del items.count
        return x + 1, made

    compiled = sidefx_train.compile(step, backend="eager")
    for _ in range(3):
        _, made = compiled(torch.ones(2))
        assert described(made) == ("Items", [1, ("list", [2], {})], {"note": ("list", ["new"], {}), "count": 1})
        assert vars(items) == {"note": ["new"]}
        assert made.note is items.note


@pytest.mark.parametrize("make", [Named, MADE["list"], MADE["OrderedDict"], lambda: nn.Linear(1, 1)])
def test_dir_of_an_outside_object(make):
    """Regression: only the attributes that had been read before were listed."""
    value = make()

    def step(x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
        return x + 1, dir(value)

    compiled = sidefx_train.compile(step, backend="eager")
    for name in ("", "later"):
        if name:
            setattr(value, name, 1)
        for _ in range(2):
            assert compiled(torch.ones(2))[1] == dir(value)
