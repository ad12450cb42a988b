"""Iterators that several loops, wrappers or calls advance, around graph breaks; iterators from outside the step."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.parity import Program, parity

Items = list[float]


def pairs(x: Any, items: Items) -> Any:
    it = iter(items)
    for a, b in zip(it, it, strict=False):
        x = x * a if x.sum().item() > 0 else x - b
    return x


def thirds(x: Any, items: Items) -> Any:
    for a, b, c in zip(*[iter(items)] * 3, strict=False):
        x = x * a if x.sum().item() > 0 else x - b + c
    return x


def counted_pairs(x: Any, items: Items) -> Any:
    it = iter(items)
    for i, (a, b) in enumerate(zip(it, it, strict=False)):
        x = x * a + i if x.sum().item() > 0 else x - b
    return x


def two_counts(x: Any, items: Items) -> Any:
    it = iter(items)
    for (i, a), (j, b) in zip(enumerate(it), enumerate(it), strict=False):
        x = x * a + i if x.sum().item() > 0 else x - b * j
    return x


def loops_in_loops(x: Any, items: Items) -> Any:
    it = iter(items)
    for i, a in enumerate(it):
        for b in it:
            x = x * a + i if x.sum().item() > 0 else x - b
            if b > 3:
                break
    return x


def takes_one_more(x: Any, items: Items) -> Any:
    it = iter(items)
    for i, a in enumerate(it):
        x = x * i + a if x.sum().item() > 0 else x + next(it, 0.5)
    return x


def takes_of_an_attribute(x: Any, items: Items) -> Any:
    held = SimpleNamespace(it=iter(items))
    for i, a in enumerate(held.it):
        x = x * i + a if x.sum().item() > 0 else x + next(held.it, 0.5)
    return x


def takes_of_a_list(x: Any, items: Items) -> Any:
    held = [iter(items)]
    for i, a in enumerate(held[0]):
        x = x * i + a if x.sum().item() > 0 else x + next(held[0], 0.5)
    return x


def counts_values(x: Any, items: Items) -> Any:
    for i, a in enumerate(dict(enumerate(items)).values()):
        x = x * i + a if x.sum().item() > 0 else x - 2
    return x


def counts_what_is_mapped(x: Any, items: Items) -> Any:
    seen: list[float] = []
    for i, a in enumerate(map(lambda item: (seen.append(item), item)[1], items)):
        x = x * i + a + len(seen) if x.sum().item() > 0 else x - 2
    return x


def counts_modules(x: Any, items: Items) -> Any:
    for i, a in enumerate(torch.nn.ModuleList(torch.nn.Identity() for _ in items)):
        x = a(x) * i + 1 if x.sum().item() > 0 else x - 2
    return x


INSIDE = {
    step.__name__: step
    for step in (
        *(pairs, thirds, counted_pairs, two_counts, loops_in_loops, takes_one_more, takes_of_an_attribute),
        *(takes_of_a_list, counts_values, counts_what_is_mapped, counts_modules),
    )
}


@pytest.mark.parametrize("name", INSIDE)
def test_iterators_with_several_readers(name: str) -> None:
    """Each loop goes on in a captured part after its break."""

    def make() -> Program:
        items, calls = [1.5, 0.5, 2.0, 4.0, 0.25, 3.0, 1.25], [0]

        def step(x: torch.Tensor) -> Any:
            calls[0] += 1
            return INSIDE[name](x, items[: 5 + calls[0] % 3])

        return Program(step, lambda call: (torch.linspace(-1, 1.2 - call * 0.2, 4),), (items, calls))

    parity(make, steps=6, captures=None, whole=False)


def once(x: Any, held: Any) -> Any:
    return x * next(held.it)


def with_a_default(x: Any, held: Any) -> Any:
    return x * next(held.it) + next(held.it, 9.0)


def after_a_break(x: Any, held: Any) -> Any:
    x = x * next(held.it, 2.0)
    x = x + 1 if x.sum().item() > 0 else x - 1
    return x * next(held.it, 3.0)


def in_a_loop(x: Any, held: Any) -> Any:
    for a in held.it:
        x = x * a + 1
        if x.sum().item() > 0:
            break
    return x


def into_a_list(x: Any, held: Any) -> Any:
    return x * sum([a for a, _ in zip(held.it, range(2), strict=False)])


def by_unpacking(x: Any, held: Any) -> Any:
    first, *rest = itertools.islice(held.it, 2)
    return x * first + len(rest)


def renewed(x: Any, held: Any) -> Any:
    try:
        a = next(held.it)
    except StopIteration:
        held.it = held.make()
        a = next(held.it)
    return x * a


def renewed_every_time(x: Any, held: Any) -> Any:
    held.it = held.make()
    x = x * next(held.it)
    x = x + 1 if x.sum().item() > 0 else x - 1
    return x * next(held.it, 5.0)


def renewed_in_a_loop(x: Any, held: Any) -> Any:
    held.it = held.make()
    for i, a in zip(range(3), held.it, strict=False):
        x = x * a + i if x.sum().item() > 0 else x - next(held.it, 0.0)
    return x


def asked_how_many(x: Any, held: Any) -> Any:
    return x * operator.length_hint(held.it, 7)


def printed(x: Any, held: Any) -> Any:
    return x * len(f"{held.it}, {[held.it]!r}".replace(hex(id(held.it)), ""))


def passed_on(x: Any, held: Any) -> Any:
    held.other = held.it
    return x * (iter(held.it) is held.it) + isinstance(held.it, type(iter([]))) + (held.it == held.it)


OUTSIDE = {
    step.__name__: step
    for step in (
        *(once, with_a_default, after_a_break, in_a_loop, into_a_list, by_unpacking, renewed, renewed_every_time),
        *(renewed_in_a_loop, asked_how_many, printed, passed_on),
    )
}
KINDS: dict[str, Callable[[Items], Any]] = {
    "list": iter,
    "range": lambda items: iter(range(1, 1 + len(items))),
    "reversed": reversed,
    "generator": lambda items: (item for item in items),
    "map": lambda items: map(abs, items),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OUTSIDE)
def test_iterators_from_outside(name: str, kind: str) -> None:
    """They are advanced at every call, never by a capture."""

    def make() -> Program:
        items = [1.5, 0.5, 2.0, 4.0, 0.25, 3.0, 1.25, 0.75, 5.0]
        held = SimpleNamespace(make=lambda: KINDS[kind](items), log=[])
        held.it = held.make()

        def step(x: torch.Tensor) -> Any:
            try:
                return OUTSIDE[name](x, held)
            except (StopIteration, ValueError) as error:
                held.log.append(str(error))
                return x

        return Program(step, lambda call: (torch.linspace(-1, 1.2 - call * 0.2, 4),), (held.log, items))

    parity(make, steps=6, captures=None, whole=False)
