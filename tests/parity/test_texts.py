"""Texts in a batch, such as file names: other ones at every call, handed on and never decided on."""

from __future__ import annotations

import pytest
import torch

from tests.parity.harness import Program, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


def rows(index):
    return torch.full((2, 3), float(index)), [{"id": f"row {index}.{i}", "split": "train"} for i in range(2)]


def test_ids_are_handed_on():
    def make() -> Program:
        seen, last = [], {}

        def step(x, meta):
            seen.extend(row["id"] for row in meta)
            last["id"] = meta[0]["id"]
            print(f"batch of {meta[0]['id']} in {meta[0]['split']}: {x.sum():.1f}")
            return x * 2, [row["id"] for row in meta], f"{meta[1]['id']}!"

        return Program(step, rows, (seen, last))

    report = parity(make, steps=12, captures=None)
    assert report.graph_count <= 3, [r.source for r in report.recaptures]


def test_what_c_code_does_with_texts():
    """Each of these looks into the texts: they are exact then, or the line runs natively."""
    uses = {
        "set": lambda names, log: len(set(names)),
        "dict": lambda names, log: {name: 1 for name in names},
        "in a list": lambda names, log: "same" in names,
        "index": lambda names, log: names.index(names[1]),
        "join": lambda names, log: "-".join(names),
        "sorted": lambda names, log: sorted(names),
        "max": lambda names, log: max(names),
        "split": lambda names, log: names[0].split(" "),
        "slice": lambda names, log: names[0][:2],
        "length": lambda names, log: len(names[0]),
        "count": lambda names, log: log.setdefault("seen", set()).update(names),
        "key": lambda names, log: log.__setitem__(names[0], log.get(names[0], 0) + 1),
        "or": lambda names, log: names[0] or "nothing",
    }
    for title, use in uses.items():

        def make(use=use) -> Program:
            log: dict = {}

            def step(x, names):
                return x * 2, use(names, log)

            def batch(index):
                return torch.ones(3), ["same", "same"] if index % 3 == 0 else [f"b {index}", f"a {index}"]

            return Program(step, batch, (log,))

        report = parity(make, steps=9, captures=None, whole=False)
        assert not any(f.code == "SFX204" for f in report.fallbacks), title


def test_a_text_that_is_decided_on_is_exact():
    def make() -> Program:
        seen: list = []

        def step(x, mode, name):
            seen.append(name)
            if mode == "double":
                return x * 2
            return x + len(mode)

        def batch(index):
            return torch.ones(3) * index, ("double", "half", "other")[index % 3], f"name {index}"

        return Program(step, batch, (seen,))

    parity(make, steps=12, captures=None, whole=False)
