"""What NumPy makes of numbers and arrays that change at every call: computed before the graph, in one graph for all."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sidefx_train

X = torch.arange(6.0).view(2, 3)


def shown(value):
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value), value.dtype, value.tolist()
    if isinstance(value, (tuple, list)):
        return [shown(item) for item in value]
    return {name: shown(item) for name, item in vars(value).items()} if isinstance(value, SimpleNamespace) else value


def both(step, calls=6, arguments=lambda index: ()):
    def run(fn):
        random.seed(0)
        np.random.seed(0)
        kept, found = SimpleNamespace(n=3, t=0.25), []
        for index in range(calls):
            given = arguments(index)
            result = fn(kept, X + index, *given)
            found.append(shown([result, [type(result)], given, kept]))
        return found

    compiled = sidefx_train.compile(step, backend="eager")
    assert repr(run(compiled)) == repr(run(step))  # NaN is among the numbers
    return compiled.report()


def ticked(kept):
    kept.n += 1
    kept.t *= 1.5
    return kept


NUMBERS = {
    "array": lambda kept, x: x * torch.from_numpy(np.array([ticked(kept).t, kept.t + 1, 2.0])),
    "full": lambda kept, x: x * torch.from_numpy(np.full(3, ticked(kept).t)),
    "linspace": lambda kept, x: x * torch.from_numpy(np.linspace(0, ticked(kept).t, 3)),
    "product": lambda kept, x: x * torch.tensor(np.arange(3) * ticked(kept).t),
    "item_of_array": lambda kept, x: x * np.array([ticked(kept).t, 1.0])[0],
    "bit_length": lambda kept, x: x * ticked(kept).n.bit_length(),
    "bit_count": lambda kept, x: x * ticked(kept).n.bit_count(),
    "ratio": lambda kept, x: x * (lambda pair: pair[0] / pair[1])(ticked(kept).t.as_integer_ratio()),
    "item": lambda kept, x: x * np.cos(ticked(kept).t).item(),
    "is_integer": lambda kept, x: x * 2 if (ticked(kept).t + 0.1).is_integer() else x,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change(name):
    report = both(NUMBERS[name])
    assert len(report.captures) == 1 and not report.breaks


def test_a_truth_of_a_number_is_guarded():
    report = both(lambda kept, x: x * 2 if ticked(kept).n.bit_length() > 3 else x, calls=8)
    assert len(report.captures) == 2 and not report.breaks


ARRAYS = {
    "mean": lambda kept, x, a: a.sum() / len(a),
    "scaled": lambda kept, x, a: x * torch.from_numpy((a - a.mean()) / (a.std() + 1e-8)).float(),
    "clipped": lambda kept, x, a: x * torch.tensor(np.clip(a, -1, 1)),
    "items": lambda kept, x, a: x * float(a[0]) + a[-1],
    "np.mean": lambda kept, x, a: x * np.mean(a) + float(np.sum(a)),
    "median": lambda kept, x, a: x * np.median(a) * np.linalg.norm(a),
    "returned": lambda kept, x, a: (a * 2, np.concatenate([a, a]), a.tolist()),
    "rows": lambda kept, x, a: x * torch.from_numpy(a[np.random.choice(len(a), 2)]).sum(),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_from_outside_that_change(name):
    """Their contents are guarded until they have changed."""
    random_state = np.random.RandomState(0)
    batches = [random_state.randn(3) for _ in range(8)]
    report = both(ARRAYS[name], calls=8, arguments=lambda index: (batches[index],))
    assert len(report.captures) == (1 if name == "rows" else 2) and not report.breaks


def test_arrays_whose_contents_decide():
    """They are guarded by contents until these have changed three times: two masks are two captures."""

    def step(kept, x, mask):
        return x[:, torch.from_numpy(mask.nonzero()[0])].sum() if mask[0] else x * len(np.unique(mask))

    masks = [np.array([True, False, True]), np.array([False, True, True])]
    report = both(step, calls=8, arguments=lambda index: (masks[index % 2],))
    assert len(report.captures) == 2 and not report.breaks and not report.fallbacks


def test_means_without_a_number():
    """NaN is no input of a graph."""

    def step(kept, x, a):
        return x * a.mean(), x + a.max()

    batches = [np.arange(3.0) + index for index in range(8)]
    batches[1][0] = batches[4][2] = np.nan
    batches[5][1] = np.inf
    both(step, calls=8, arguments=lambda index: (batches[index],))


def test_truths_are_of_the_class_that_numpy_has():
    def step(kept, x, a):
        found = (a > 0).any()
        return x * (2 if ~found else 3), found, a.tolist()

    report = both(step, calls=6, arguments=lambda index: (np.full(9000, float(index % 2)) - 0.5,))
    assert len(report.captures) == 2


def test_lists_of_another_length():
    def step(kept, x, a):
        return x * sum(a[a > 0].tolist()), len(a[a > 0].tolist())

    batches = [np.zeros(9000) for _ in range(6)]
    for index, batch in enumerate(batches):
        batch[: index // 2] = 1.5
    both(step, calls=6, arguments=lambda index: (batches[index],))


def test_numbers_that_no_graph_takes():
    def step(kept, x, a):
        return x * a[:2].tolist()[0], a.max()

    batches = [np.ones(9000) for _ in range(5)]
    batches[2][0] = np.inf
    batches[3][:] = np.nan
    batches[4][0] = 1e30
    both(step, calls=5, arguments=lambda index: (batches[index],))


def test_rows_of_images():
    images = np.random.RandomState(0).randint(0, 255, (30, 12, 40)).astype(np.uint8)
    report = both(lambda kept, x: x.sum() + torch.from_numpy(images[np.random.randint(0, 30, 4)]).float().mean())
    assert len(report.captures) == 1 and not report.breaks


def test_an_array_that_is_written_through_a_tensor():
    def step(kept, x, a):
        half = a[:1500] * 0.5
        torch.from_numpy(a).mul_(2)
        return x * torch.from_numpy(half).sum() + float(a.sum())

    batches = [np.random.RandomState(index).randn(9000) for index in range(4)]
    both(step, calls=4, arguments=lambda index: (batches[index].copy(),))


def test_a_view_of_a_large_array_shares_its_memory():
    def step(kept, x, a):
        view = a[:2]
        torch.from_numpy(a).add_(1)
        return x * torch.from_numpy(view).sum()

    batches = [np.random.RandomState(index).randn(9000) for index in range(4)]
    report = both(step, calls=4, arguments=lambda index: (batches[index].copy(),))
    assert not report.breaks


def test_numpy_warns_as_in_eager():
    """Where NumPy would warn, it computes natively."""

    def step(kept, x):
        return x * torch.from_numpy(np.array([kept.t]) / np.array([float(ticked(kept).n - 6)]))

    compiled = sidefx_train.compile(step, backend="eager")
    kept = SimpleNamespace(n=3, t=0.25)
    for _ in range(2):
        compiled(kept, X)
    with pytest.warns(RuntimeWarning, match="divide by zero"):
        compiled(kept, X)


class Counted:
    """A schedule in arrays, looked up by a counter."""

    def __init__(self):
        self.place = 0
        self.steps = np.linspace(0.1, 1.0, 40)
        self.single = np.linspace(0.1, 1.0, 40).astype(np.float32)
        self.rows = np.arange(160, dtype=np.float32).reshape(40, 4) / 100


LOOKUPS = {
    "number": lambda kept: torch.tensor(kept.steps[kept.place]),
    "single": lambda kept: torch.ones(2) * kept.single[kept.place],
    "from the end": lambda kept: torch.tensor(kept.steps[kept.place - 40]),
    "row": lambda kept: torch.from_numpy(kept.rows[kept.place]) * 2,
    "element": lambda kept: torch.ones(2) * kept.rows[kept.place, 1],
    "column": lambda kept: torch.tensor(kept.rows[kept.place : kept.place + 3, 1]),
    "slice": lambda kept: torch.tensor(kept.steps[kept.place : kept.place + 3]) * (1 - kept.steps[kept.place]),
    "list": lambda kept: torch.as_tensor(kept.steps[[kept.place, kept.place + 2]]),
    "row kept": lambda kept: (setattr(kept, "row", kept.rows[kept.place]), torch.ones(1))[1],
}


def test_transposed_arrays_of_drawn_numbers():
    def step(kept, x):
        noise = np.random.randn(3, 2)
        kept.n = noise.T
        return x * torch.from_numpy(noise.T.copy()) + torch.from_numpy(noise.T) * noise.T.mean(0)[1]

    report = both(step)
    assert len(report.captures) == 1 and not report.breaks


@pytest.mark.parametrize("look", LOOKUPS.values(), ids=LOOKUPS)
def test_looked_up_by_a_counter(look):
    found = []
    for compiled in (False, True):
        kept = Counted()

        def step(x, kept=kept):
            y = x * look(kept).sum()
            kept.place += 1
            return y

        run = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise") if compiled else step
        rows = []
        for _ in range(20):
            rows.append((run(torch.ones(2)).tolist(), getattr(kept, "row", kept.steps).tolist()))
        found.append(rows)
    assert found[0] == found[1]
    assert len(run.report().captures) <= 2


def test_looked_up_beyond_the_end():
    kept = Counted()
    kept.place = 36

    def step(x):
        y = x * torch.from_numpy(kept.rows[kept.place])
        kept.place += 1
        return y

    run = sidefx_train.compile(step, backend="eager")
    for _ in range(4):
        run(torch.ones(4))
    with pytest.raises(IndexError, match="out of bounds"):
        run(torch.ones(4))
    assert kept.place == 40
