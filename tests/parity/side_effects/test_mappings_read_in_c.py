"""Dict subclasses whose methods are Python code, given to C code that fills a dict: it calls them at each call."""

from __future__ import annotations

import collections
import json
import operator
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import sidefx_train

LOG: list[Any] = []


class Scale:
    factor = 1.0


class Scaled(dict):
    """Items depend on something else; ``dict`` looks into it directly."""

    def __getitem__(self, key: str) -> float:
        LOG.append(key)
        return dict.__getitem__(self, key) * Scale.factor

    def keys(self) -> Any:
        LOG.append("keys")
        return dict.keys(self)

    def items(self) -> Any:
        LOG.append("items")
        return dict.items(self)


class Iterated(Scaled):
    """It has an iteration of its own, so that ``dict`` asks ``keys`` and ``__getitem__``."""

    def __iter__(self) -> Any:
        LOG.append("iter")
        return dict.__iter__(self)


class Ordered(collections.OrderedDict):
    def __getitem__(self, key: str) -> float:
        LOG.append(key)
        return collections.OrderedDict.__getitem__(self, key) * Scale.factor


class Pages(list):
    def __iter__(self) -> Any:
        LOG.append("iter")
        return list.__iter__(self)

    def __len__(self) -> int:
        LOG.append("len")
        return list.__len__(self)


USES: dict[str, Any] = {
    "dict": lambda m: dict(m)["x"],
    "display": lambda m: {**m, "z": 1.0}["x"],
    "keywords": lambda m: (lambda x, y: x + y)(**m),
    "update": lambda m: (lambda d: (d.update(m), d["x"])[1])({}),
    "union": lambda m: ({} | m)["x"],
    "ordered": lambda m: collections.OrderedDict(m)["x"],
    "json": lambda m: float(len(json.dumps(m))),
    "format": lambda m: float("{x}".format(**m)),
}
KINDS = {"scaled": Scaled, "iterated": Iterated, "ordered": Ordered}


def outcome(use: Any, made: Any, captured: bool) -> Any:
    LOG.clear()

    def step(x):
        return x * use(made)

    fn = sidefx_train.compile(step, backend="eager") if captured else step
    results = []
    for factor in (1.0, 2.0, 3.0, 4.0):
        Scale.factor = factor
        results.append(fn(torch.ones(2)).tolist())
    return results, list(LOG)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", USES)
def test_its_methods_run_at_each_call(use, kind):
    made = KINDS[kind](x=1.0, y=2.0)
    assert outcome(USES[use], made, captured=True) == outcome(USES[use], made, captured=False)


class Counted(Mapping):
    """A mapping of the program, whose views are those of ``collections.abc``."""

    def __getitem__(self, key: str) -> int:
        LOG.append(key)
        return {"a": 1, "b": 2}[key]

    def __iter__(self) -> Any:
        LOG.append("iter")
        yield from ("a", "b")

    def __len__(self) -> int:
        return 2


OPERATORS: dict[str, Any] = {
    "or": operator.or_,
    "and": operator.and_,
    "sub": operator.sub,
    "xor": operator.xor,
    "isdisjoint": lambda view, other: view.isdisjoint(other),
    "reflected": lambda view, other: other | view,
    "refused": lambda view, other: view <= other,
}
OPERANDS: dict[str, Any] = {
    "keys": lambda m: m.keys(),
    "items": lambda m: m.items(),
    "values": lambda m: m.values(),
    "iterator": iter,
}


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", OPERATORS)
def test_the_other_operand_of_a_dict_view_is_iterated_at_each_call(name, operand):
    def use(m):
        mine, other = {"a": 1, "c": 3}, OPERANDS[operand](m)
        try:
            found = OPERATORS[name](mine.items() if operand == "items" else mine.keys(), other)
        except TypeError as error:
            LOG.append(str(error))
            return 0.0
        LOG.append(found if type(found) is bool else sorted(map(str, found)))
        return Scale.factor

    assert outcome(use, Counted(), captured=True) == outcome(use, Counted(), captured=False)


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
def test_a_list_with_methods_of_its_own_becomes_a_tensor():
    def use(pages):
        return torch.tensor(pages).sum() + torch.stack([torch.ones(()), *pages[:0]]).sum()

    made = Pages([1.0, 2.0])
    assert outcome(use, made, captured=True) == outcome(use, made, captured=False)
