"""Contributions to a gradient are added in the order of the backward, whichever nodes deliver them."""

from __future__ import annotations

import random

import pytest

from sidefx_train.compile.autograd.accumulation_order import Contribution, accumulated_too_early


def engine(given: list[Contribution]) -> list[int]:
    """Returns the positions of contributions in the order in which the engine adds them: the newest node runs first."""
    late = accumulated_too_early(given)
    around = {which for which, _ in late}
    made: list[tuple[str, int]] = []
    for node in range(max(each.node for each in given) + 1):
        made += [("ordering", which) for which, before in late if before == node]
        made.append(("node", node))
    added: list[int] = []
    for kind, number in reversed(made):
        if kind == "ordering":
            added.append(given[number].place)
        else:
            added += [each.place for i, each in enumerate(given) if each.node == number and i not in around]
    return added


@pytest.mark.parametrize("seed", range(50))
def test_in_the_order_of_the_backward(seed: int) -> None:
    draw = random.Random(seed)
    places = draw.sample(range(100), draw.randint(1, 12))
    given = [Contribution(place, draw.randrange(4)) for place in sorted(places, reverse=True)]
    assert engine(given) == sorted(places, reverse=True)


def test_nothing_is_reordered_without_need() -> None:
    assert not accumulated_too_early([Contribution(9, 2), Contribution(8, 2), Contribution(5, 1), Contribution(3, 0)])
    assert accumulated_too_early([Contribution(9, 1), Contribution(5, 0), Contribution(3, 1)]) == [(2, 0)]
