"""Results whose size depends on contents (masks, bins, different values) that the prologue counts before the graph."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, parity

WIDTH = 4


def bins(net, rows, y):
    n = torch.bincount(rows)
    sums = torch.zeros(n.shape[0], WIDTH).index_add(0, rows, net.layer(y))
    return F.batch_norm(sums / n.clamp(min=1)[:, None], None, None, training=True)


def weighted_bins(net, rows, y):
    n = torch.bincount(rows, weights=y[:, 0].detach(), minlength=6)
    return F.mse_loss(net.layer(y)[: n.shape[0]].sum(1), n[: net.layer(y).shape[0]].float())


def different(net, rows, y):
    ids, place, count = torch.unique(rows, return_inverse=True, return_counts=True)
    means = torch.zeros(len(ids), WIDTH).index_add(0, place, net.layer(y)) / count[:, None]
    return F.mse_loss(means, torch.ones(len(ids), WIDTH)), ids, place, count


def different_of_a_matrix(net, rows, y):
    ids, place = torch.unique(rows.view(2, -1), return_inverse=True)
    return F.batch_norm(net.layer(y)[: ids.shape[0]], None, None, training=True), ids, place


def runs(net, rows, y):
    ids, place, count = torch.unique_consecutive(rows, return_inverse=True, return_counts=True)
    means = torch.zeros(len(ids), WIDTH).index_add(0, place, net.layer(y)) / count[:, None]
    return F.mse_loss(means, torch.ones(len(ids), WIDTH)), ids, place, count


def runs_of_a_matrix(net, rows, y):
    ids, place, count = torch.unique_consecutive(rows.view(2, -1), return_inverse=True, return_counts=True)
    return F.batch_norm(net.layer(y)[: ids.shape[0]], None, None, training=True), ids, place, count


def selected(net, rows, y):
    return F.batch_norm(net.layer(y)[rows > 1], None, None, training=True)


def selected_columns(net, rows, y):
    return F.layer_norm(net.layer(y).t()[:, rows > 1], [int((rows > 1).sum())])


def masked_select(net, rows, y):
    h = net.layer(y)
    return F.mse_loss(h.masked_select((rows > 1)[:, None].expand(-1, WIDTH)), torch.ones(int((rows > 1).sum()) * WIDTH))


def repeated(net, rows, y):
    times = torch.repeat_interleave(rows)
    return F.batch_norm(net.layer(y)[times], None, None, training=True)


STEPS = (
    bins, weighted_bins, different, different_of_a_matrix, runs, runs_of_a_matrix, selected, selected_columns,
    masked_select, repeated,
)  # fmt: skip


class Net:
    def __init__(self) -> None:
        self.layer = torch.nn.Linear(3, WIDTH)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.001)


def batch(index):
    numbers = torch.Generator().manual_seed(index)
    return torch.randint(0, 5 + index % 3, (12,), generator=numbers), torch.rand(12, 3, generator=numbers)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("loss", STEPS, ids=lambda fn: fn.__name__)
@pytest.mark.covering(1)
def test_counted_before_the_graph(loss, backend):
    def make() -> Program:
        net = Net()

        def step(rows, y):
            made = loss(net, rows, y)
            first, *rest = made if isinstance(made, tuple) else (made,)
            first.square().mean().backward()
            net.optimizer.step()
            net.optimizer.zero_grad()
            return first.detach(), rest

        return Program(step, batch, (net.layer, net.optimizer))

    report = parity(make, steps=6, captures=None, backend=backend)
    assert report.graph_count <= 3, report.breaks


def test_errors_of_bins_are_eagers():
    def step(rows):
        return F.batch_norm(torch.zeros(torch.bincount(rows).shape[0], 2), None, None, training=True)

    captured = sidefx_train.compile(step, backend="eager")
    for rows in ([0, 1, 3], [0, 2, 1], [4, 1, 1], [0, -1, 2], [2, 2, 0]):
        outcomes = []
        for run in (step, captured):
            try:
                outcomes.append(run(torch.tensor(rows)).shape)
            except (RuntimeError, ValueError) as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def crops(net, xs):
    """Passes images of one size through the network together, as multi-crop training does."""
    ends = torch.cumsum(torch.unique_consecutive(torch.tensor([len(x) for x in xs]), return_counts=True)[1], 0)
    start, out = 0, torch.empty(0)
    for end in ends:
        out = torch.cat((out, net.layer(torch.cat(xs[start:end]))))
        start = end
    return out


def parts(net, xs):
    """Splits rows by the runs of their labels."""
    labels = torch.cat([torch.full((len(x),), place) for place, x in enumerate(xs)])
    counts = torch.unique_consecutive(labels, return_counts=True)[1]
    return torch.stack([part.square().mean() for part in net.layer(torch.cat(xs)).split(counts.tolist())])


def offsets(net, xs):
    """Slices rows at offsets that are tensors."""
    h = net.layer(torch.cat(xs))
    ends = torch.cat([torch.zeros(1, dtype=torch.long), torch.tensor([len(x) for x in xs]).cumsum(0)])
    return torch.stack([h[a:b].square().mean() for a, b in zip(ends[:-1], ends[1:], strict=True)])


@pytest.mark.parametrize("loss", [crops, parts, offsets], ids=lambda fn: fn.__name__)
def test_numbers_made_of_sizes_that_change(loss):
    def make() -> Program:
        net = Net()

        def step(xs):
            out = loss(net, xs)
            out.square().mean().backward()
            net.optimizer.step()
            net.optimizer.zero_grad()
            return out.detach()

        def batch(index):
            numbers = torch.Generator().manual_seed(index)
            return ([torch.rand(3 + (index + k // 2) % 5, 3, generator=numbers) for k in range(4)],)

        return Program(step, batch, (net.layer, net.optimizer))

    report = parity(make, steps=20, captures=None)
    assert not report.breaks
    assert len(report.captures) <= 3


WRONG_MASKS = {
    "rows": lambda x: x[torch.tensor([False, True])],
    "columns": lambda x: x[:, [False, True]],
    "a matrix": lambda x: x[torch.ones(3, 2, dtype=torch.bool)],
    "no elements": lambda x: x[..., torch.ones(0, dtype=torch.bool)],
    "beside a place": lambda x: x[torch.tensor([True, False]), 0],
}


@pytest.mark.parametrize("select", WRONG_MASKS)
def test_a_constant_mask_of_another_shape_raises(select):
    def make() -> Program:
        def step(x):
            return WRONG_MASKS[select](x).sum()

        return Program(step, lambda index: (torch.randn(3, 4),), ())

    report = parity(make, steps=3, captures=None, whole=False)
    assert report.calls == 3
