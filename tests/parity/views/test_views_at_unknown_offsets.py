"""Views that leave a step and begin where only the graph knows."""

from __future__ import annotations

import pytest
import torch

from tests.support.parity import Program, parity

VIEWS = {
    "row": lambda h, place: h[place],
    "from there": lambda h, place: h[place:],
    "column": lambda h, place: h[:, place, 1:],
    "of a view": lambda h, place: h[1:][:, place].t(),
    "two": lambda h, place: (h[place], h[place][place:]),
}


@pytest.mark.parametrize("of_argument", [False, True])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_at_unknown_offsets(view, of_argument):
    def make() -> Program:
        layer = torch.nn.Linear(4, 4)
        kept: dict = {}

        def step(x):
            place = int(x.sum(dim=(1, 2)).argmax())
            h = layer(x)
            h.mean().backward()
            kept["view"] = view(x if of_argument else h.detach(), place)
            return kept["view"]

        return Program(step, lambda index: (torch.randn(4, 6, 4),), (layer, kept))

    parity(make, steps=20, captures=2)
