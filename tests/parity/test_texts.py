"""Texts in a batch, such as file names: other ones at every call, handed on and never decided on."""

from __future__ import annotations

import torch

from tests.parity.harness import Program, parity


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
