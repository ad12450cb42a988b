"""Lookups in a pandas ``Index`` are constants of the step."""

from __future__ import annotations

import pytest
import torch

import sidefx_train

pandas = pytest.importorskip("pandas")

NAMES = ["y", "a", "b", "mask"]
ROWS = pandas.RangeIndex(5, 9)


def missing(columns, x):
    try:
        columns.get_loc("another")
    except KeyError:
        return x * 2
    return x


def checked(columns, x):
    """As neuralforecast does it."""
    columns = columns.copy()
    wanted = sorted(set(columns.tolist()) & {"a", "b"})
    found = columns.get_indexer(wanted)
    if any(place == -1 for place in found):
        raise ValueError(f"{wanted} are missing")
    return x[:, found]


WHOLE = {
    "get_loc": lambda columns, x: x[:, [columns.get_loc("a"), columns.get_loc("b")]],
    "get_indexer": lambda columns, x: x[:, columns.get_indexer(["a", "b"])],
    "isin": lambda columns, x: x[:, torch.as_tensor(columns.isin(["a", "b"]))],
    "tolist": lambda columns, x: x[:, [columns.tolist().index("a"), columns.to_list().index("b")]],
    "in": lambda columns, x: x * (2 if "a" in columns else 1) * (3 if "c" in columns else 1),
    "len": lambda columns, x: x * len(columns) + len(columns.copy()),
    "numbers": lambda columns, x: x * ROWS.get_loc(7) if "a" in columns else x,
    "checked": checked,
}
LEFT = {
    "missing": missing,
    "duplicates": lambda columns, x: x * columns.append(columns).get_loc("a").sum(),
    "kept": lambda columns, x: (x, columns.copy())[0] * len(columns.get_indexer(columns)),
}


def trained(wrap, look_up, names):
    """Returns the step, and its results with each index twice in turn."""
    indices = [pandas.Index(each) for each in names]
    weight = torch.ones((), requires_grad=True)

    def step(batch):
        weight.grad = None
        loss = look_up(batch["columns"], batch["x"]).sum() * weight
        loss.backward()
        return loss.detach()

    step, results = wrap(step), []
    for i in range(2 * len(indices)):
        x = torch.arange(8.0).reshape(2, 4) + i
        results += [step({"x": x, "columns": indices[i // 2]}), weight.grad.clone()]
    return step, results


def compiled(fn):
    return sidefx_train.compile(fn, backend="eager", keep_slower=True)


@pytest.mark.parametrize("name", WHOLE)
def test_captured_whole(name):
    _, expected = trained(lambda fn: fn, WHOLE[name], [NAMES])
    step, found = trained(compiled, WHOLE[name], [NAMES])
    assert all(map(torch.equal, found, expected))
    report = step.report()
    assert report.replays == 2 and len(report.captures) == 1 and not report.breaks, f"{report}"


@pytest.mark.parametrize("name", ["get_loc", "isin", "checked"])
def test_another_index(name):
    """Equal items, in an index of every batch, need no further capture; others do."""
    names = [NAMES, NAMES, NAMES, ["b", "y", "a", "mask"], NAMES]
    _, expected = trained(lambda fn: fn, WHOLE[name], names)
    step, found = trained(compiled, WHOLE[name], names)
    assert all(map(torch.equal, found, expected))
    report = step.report()
    assert len(report.captures) == 3 and not report.breaks, f"{report}"


@pytest.mark.parametrize("name", LEFT)
def test_left_to_pandas(name):
    _, expected = trained(lambda fn: fn, LEFT[name], [NAMES])
    _, found = trained(compiled, LEFT[name], [NAMES])
    assert all(map(torch.equal, found, expected))


def test_a_copy_that_is_kept():
    kept, columns = [], pandas.Index(NAMES, name="columns")

    def step(x):
        kept.append(columns.copy())
        return x * 2

    captured = sidefx_train.compile(step, backend="eager")
    for _ in range(2):
        assert torch.equal(captured(torch.ones(2)), torch.full((2,), 2.0))
    assert len(kept) == 2 and kept[0] is not kept[1] and kept[0].equals(columns) and kept[0].name == "columns"
