"""Objects that leave a step: its result, new objects, and metrics that it updates."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, batches, mlp, parity
from tests.support.side_effects import Plain, check


def test_new_objects_escape():
    def body(self, loss, x):
        made = Plain()
        made.loss, made.back = loss.detach(), self
        self.items.append(made)

    check(body, fields=lambda: {"items": []})


def test_returned_structure():
    def body(self, loss, x):
        view = x[1:]
        return {"x": x, "view": view, "pair": (loss.detach(), [x, view]), "none": None, "n": x.shape[0]}

    check(body)


def test_results_that_alias_inputs():
    """Results share memory with arguments exactly where eager's do."""
    model = nn.Linear(3, 3)

    def step(x):
        model(x)
        return x, x[1:], x.t(), x.clone(), x.detach()

    compiled = sidefx_train.compile(step, backend="inductor", fullgraph=True, on_failure="raise")
    for _ in range(3):
        x = torch.randn(4, 3)
        same, rows, transposed, clone, detached = compiled(x)
        assert same is x, "the argument itself was returned"
        x.fill_(7)
        assert bool((rows == 7).all() and (transposed == 7).all() and (detached == 7).all()), "views lost their base"
        assert not bool((clone == 7).any()), "the clone shares memory"
        assert transposed.shape == (3, 4), f"{transposed.shape}"


@pytest.mark.parametrize("nan_at", [None, 3])
def test_metric_object(nan_at):
    """torchmetrics: Python state and tensor state of a metric updated in the step, with and without a NaN."""
    import torchmetrics

    def make() -> Program:
        model = mlp()
        metric = torchmetrics.MeanMetric()
        data = batches((5, 6), classes=3)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            metric.update(loss.detach())
            return metric.compute()

        def batch(index):
            x, y = data(index)
            return (x * float("nan") if index == nan_at else x), y

        made = Program(step, batch)
        made.metric = metric  # type: ignore[attr-defined]
        return made

    def between(made, index):
        metric = made.metric
        made.watch = (metric.mean_value.clone(), metric.weight.clone(), metric.update_count)

    if nan_at is None:
        parity(make, between=between, captures=2)
    else:
        with pytest.warns(UserWarning, match="nan"):
            parity(make, between=between, captures=2)


def test_metric_that_is_called():
    """``metric(preds, target)`` returns the batch's value and updates the running one."""
    import torchmetrics

    def make() -> Program:
        model = mlp()
        metric = torchmetrics.classification.MulticlassAccuracy(3)

        def step(x, y):
            return metric(model(x), y)

        made = Program(step, batches((5, 6), classes=3))
        made.metric = metric  # type: ignore[attr-defined]
        return made

    def between(made, index):
        made.watch = (made.metric.tp.clone(), made.metric.update_count)

    parity(make, between=between, captures=2)


def test_metric_with_a_check_of_its_own():
    """Regression: the override was skipped, as if it were torchmetrics' own method."""
    import torchmetrics

    class Doubled(torchmetrics.MeanMetric):
        def _cast_and_nan_check_input(self, x, weight=None):
            x, weight = super()._cast_and_nan_check_input(x, weight)
            return x * 2, weight

    means = []
    for compiled in (False, True):
        metric = Doubled()

        def step(x, metric=metric):
            metric.update(x.sum())

        run = sidefx_train.compile(step, backend="eager") if compiled else step
        for i in range(3):
            run(torch.full((2,), float(i)))
        means.append(metric.compute())
    assert torch.equal(*means)


@pytest.mark.parametrize("ordered", [False, True])
def test_views_of_dicts(ordered):
    """A view shows what its dict gets later, whether the dict is from outside or new."""

    class Kept:
        table = collections.OrderedDict(first=1) if ordered else {"first": 1}

    def step(kept, x):
        made = type(kept.table)(sum=x.sum(), mean=x.mean())
        kept.views = made.keys(), made.values(), made.items(), kept.table.keys(), vars(kept).keys()
        made["last"] = x.max()
        kept.table[f"call {len(kept.table)}"] = x.min()
        return made.values() if ordered else made.items()

    def outcome(run):
        kept, seen = Kept(), []
        kept.table = Kept.table.copy()
        for call in range(3):
            result = run(kept, torch.arange(4.0) + call)
            kept.table["after"] = call
            seen.append([type(result), *map(type, kept.views), list(result), *map(list, kept.views)])
        return seen

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise")
    assert outcome(compiled) == outcome(step)
