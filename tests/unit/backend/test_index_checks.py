"""Index inputs are checked before the graph runs: the used values, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sidefx_train

SIZES = (6, 4, 3)


def columns(tables, x):
    return [table(x[:, i]) for i, table in enumerate(tables)]


def unbound(tables, x):
    return [table(column) for table, column in zip(tables, x.unbind(1), strict=True)]


def unsqueezed(tables, x):
    return [table(x[:, i].unsqueeze(-1)).squeeze(1) for i, table in enumerate(tables)]


def copied(tables, x):
    return [table(x.t()[i].clone()) for i, table in enumerate(tables)]


def sliced(tables, x):
    return [tables[0](x[:, :1])[:, 0], tables[1](x[1::2, 1]), tables[2](x[:, -1])[:, None].sum(1)]


def outcome(ways, batch, backend):
    torch.manual_seed(0)
    tables = nn.ModuleList([nn.Embedding(size, 2) for size in SIZES])
    optimizer = torch.optim.SGD(tables.parameters(), 0.1)

    def step(x):
        loss = sum(part.square().sum() for way in ways for part in way(tables, x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = sidefx_train.compile(step, backend=backend, keep_slower=True) if backend else step
    found = []
    for x in batch:
        try:
            found.append(run(x))
        except IndexError:
            found.append(torch.tensor(float("nan")))
        found.append(torch.cat([parameter.detach().clone() for parameter in tables.parameters()]))
    return found, run


def valid(seed, rows=8):
    draw = torch.Generator().manual_seed(seed)
    x = torch.stack([torch.randint(0, size, (rows,), generator=draw) for size in SIZES], 1)
    x[0] = torch.tensor(SIZES) - 1
    return x


def broken(seed, column, value):
    x = valid(seed)
    x[3, column] = value
    return x


BATCHES = [*map(valid, range(3)), broken(3, 1, 4), broken(4, 2, -1), broken(5, 0, 6), valid(6)]


@pytest.mark.parametrize(
    "ways, backend",
    [
        *(([way], "aot_eager") for way in (columns, unbound, unsqueezed, copied, sliced)),
        ([columns, unbound, unsqueezed, copied, sliced], "inductor"),
    ],
    ids=["columns", "unbound", "unsqueezed", "copied", "sliced", "all"],
)
@pytest.mark.every(3)
def test_columns_with_tables_of_their_own(ways, backend):
    """Regression: each column was checked against every table, so that all steps ran eagerly."""
    wanted, _ = outcome(ways, BATCHES, None)
    found, run = outcome(ways, BATCHES, backend)
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one, equal_nan=True)
    report = run.report()
    assert report.replays == 4 and len(report.captures) == 1
    assert {each.code for each in report.fallbacks} == {"SFX202"}


def test_columns_of_a_changing_batch():
    batches = [valid(rows, rows) for rows in (8, 6, 5, 7)]
    wanted, _ = outcome([columns, unbound], batches, None)
    found, run = outcome([columns, unbound], batches, "aot_eager")
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one)
    assert run.report().replays == 4 and len(run.report().captures) == 2


def test_values_of_an_unused_column_are_no_reason_to_stop():
    batches = [valid(0), broken(1, 1, 99), broken(2, 2, -100), broken(3, 0, 6), valid(4)]
    first = [lambda tables, x: [tables[0](x[:, 0])]]
    wanted, _ = outcome(first, batches, None)
    found, run = outcome(first, batches, "aot_eager")
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one, equal_nan=True)
    assert run.report().replays == 4 and len(run.report().fallbacks) == 1
