"""``json.dumps`` in a step: the text of numbers that change, or exist only after the graph, is eager's."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch

from tests.support.parity import Program, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


class Arrays(json.JSONEncoder):
    def default(self, o):
        return o.tolist() if isinstance(o, np.ndarray) else super().default(o)


class Shouts(json.JSONEncoder):
    def encode(self, o):
        return super().encode(o).upper()


NESTED = {"a": (1, 2.5, None, True), "b": {"c": [], 3: "é"}}

WRITTEN = {
    "a loss": lambda loss, n: json.dumps({"loss": loss.item(), "n": n, "text": f"{loss.item():.2f}"}),
    "nested": lambda loss, n: json.dumps([NESTED, {"n": n, "all": [loss.item()]}]),
    "indented": lambda loss, n: json.dumps({"n": n, "loss": loss.item(), "a": "b"}, indent=2, sort_keys=True),
    "options": lambda loss, n: json.dumps({"é": loss.item(), 3: n}, ensure_ascii=False, separators=(",", ":")),
    "a line": lambda loss, n: json.dumps({"loss": loss.item()}) + "\n" + f"{n}",
    "a default": lambda loss, n: json.dumps({"n": n, "loss": loss.item()}, default=str),
    "an encoder": lambda loss, n: json.dumps({"n": n, "loss": loss.item(), "a": np.float64(2.5)}, cls=Arrays),
    "dicts": lambda loss, n: json.dumps([OrderedDict(b=n, a=loss.item()), defaultdict(list, a=[n])]),
    "infinity": lambda loss, n: json.dumps([loss.item(), float("inf"), float("nan"), n]),
}
IN_PARTS = {
    "its own encode": lambda loss, n: json.dumps({"n": n, "loss": loss.item()}, cls=Shouts),
    "an array": lambda loss, n: json.dumps({"n": n, "loss": loss.item(), "a": np.arange(n)}, cls=Arrays),
    "a tensor": lambda loss, n: json.dumps({"n": n, "loss": loss.detach()}, default=float),
    "no infinity": lambda loss, n: json.dumps({"loss": loss.item()}, allow_nan=False),
}


def _program(write) -> Program:
    lines: list = []
    weight = torch.ones(3, requires_grad=True)

    def step(x, n):
        loss = (weight * x).sum()
        loss.backward()
        lines.append(write(loss, n))
        lines.append(write(x[0], n))
        return x * 2  # behind the text, so that the rest of the step does not run natively

    return Program(step, lambda index: (torch.full((3,), index + 0.1), index), (lines, weight))


@pytest.mark.parametrize("name", WRITTEN)
def test_text_of_numbers_is_made_after_the_graph(name):
    report = parity(lambda: _program(WRITTEN[name]), steps=6, captures=None)
    assert report.graph_count <= 2, [recapture.source for recapture in report.recaptures]


@pytest.mark.parametrize("name", IN_PARTS)
def test_text_that_more_than_json_decides_on(name):
    parity(lambda: _program(IN_PARTS[name]), steps=4, captures=None, whole=False)


def test_what_cannot_be_written_raises_there():
    def make() -> Program:
        seen: list = []

        def step(x):
            seen.append("before")
            try:
                seen.append(json.dumps({"loss": x.sum().item(), "of": x}))
            except TypeError as error:
                seen.append(str(error))
            return x * 2

        return Program(step, lambda index: (torch.full((3,), float(index)),), (seen,))

    parity(make, steps=4, captures=None, whole=False)
