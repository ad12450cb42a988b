"""Data frames and series in a step: their C code calls Python functions, which the capture must not run on shadows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning

pandas = pytest.importorskip("pandas")


class World:
    def __init__(self) -> None:
        self.turn = 0
        self.log: list[Any] = []
        self.frame = pandas.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4, 5, 6]})
        self.series = pandas.Series([1.0, 2.0, 3.0], index=["x", "y", "z"])

    def noted(self, value: float) -> float:
        self.log.append(value)
        return value * 2


def written(w: World) -> Any:
    w.frame.loc[0, "a"] = w.turn
    w.series["x"] += 1
    return w.frame["a"].sum() + w.series.sum()


CASES: dict[str, Any] = {
    "grouped": lambda w: w.frame.groupby("a").sum().iloc[0, 0] * w.turn,  # it ended the process
    "mapped": lambda w: w.series.map(w.noted).sum(),
    "values": lambda w: torch.from_numpy(w.frame["a"].to_numpy(copy=True)).sum().float(),
    "written": written,
}


@pytest.mark.parametrize("name", CASES)
def test_pandas_runs_at_each_call(name):
    def run(captured: bool) -> Any:
        world = World()

        def step(x):
            world.turn += 1
            return x * CASES[name](world)

        fn = sidefx_train.compile(step, backend="eager") if captured else step
        results = [fn(torch.ones(2)).tolist() for _ in range(3)]
        return results, world.log, world.frame.to_dict(), world.series.to_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert run(captured=True) == run(captured=False)
