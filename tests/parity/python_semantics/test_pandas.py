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


def test_each_call_of_pandas_is_one_break():
    """Batches drawn from a frame: pandas is not captured instruction by instruction."""
    frame = pandas.DataFrame({"a": range(40), "b": [n * 0.5 for n in range(40)], "y": [n % 3 for n in range(40)]})

    def step(seed, weight):
        rows = frame.sample(4, random_state=seed)
        x = torch.tensor(rows[["a", "b"]].values, dtype=torch.float32)
        return (x * weight).sum() + torch.tensor(rows["y"].values).sum()

    captured = sidefx_train.compile(step, backend="eager", keep_slower=True)
    weight = torch.tensor([1.0, -2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        for seed in range(6):
            assert captured(seed, weight) == step(seed, weight)
    report = captured.report()
    assert len(report.parts) <= 5 and not report.fallbacks, str(report)
    assert all(len(part.captures) <= 2 for part in report.parts), str(report)


def test_rows_for_a_log():
    """Behind the last tensor operation pandas is no break."""

    def run(captured: bool) -> Any:
        kept = {"rows": pandas.DataFrame(columns=["n", "loss"]), "all": pandas.DataFrame({"n": [0]})}
        weight = torch.ones(2, requires_grad=True)

        def step(x):
            loss = (weight * x).sum()
            loss.backward()
            n = len(kept["rows"])
            kept["rows"].loc[n] = [n, loss.item()]
            kept["all"] = pandas.concat([kept["all"], pandas.DataFrame({"n": [n]})], ignore_index=True)
            return loss.detach()

        fn = sidefx_train.compile(step, backend="eager", fullgraph=True, keep_slower=True) if captured else step
        results = [fn(torch.full((2,), float(n))).item() for n in range(6)]
        if captured:
            assert len(fn.report().captures) <= 2 and fn.report().replays == 6, str(fn.report())
        return results, kept["rows"].to_dict(), kept["all"].to_dict(), weight.grad.tolist()

    assert run(captured=True) == run(captured=False)
