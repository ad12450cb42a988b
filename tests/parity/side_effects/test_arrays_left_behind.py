"""Arrays of NumPy that a step makes and leaves behind: views share memory with what eager's share it with."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sidefx_train


def views(kept, x):
    kept.a = np.arange(6)[2:]
    kept.b = np.arange(6).reshape(2, 3)
    kept.c = np.linspace(0, 1, 5)
    kept.d = np.arange(6)[::-1]
    kept.e = np.arange(6).reshape(2, 3).T
    kept.f = np.asfortranarray(np.arange(6.0).reshape(2, 3))[:, 1:]
    kept.g = np.broadcast_to(np.arange(3), (2, 3))


def views_of_one(kept, x):
    rows = np.zeros((4, 3))
    kept.first, kept.rows, kept.rest = rows[0], rows, rows[1:]


def views_of_one_that_is_gone(kept, x):
    rows = np.zeros((4, 3), dtype=np.float32)
    kept.flat, kept.row = rows.reshape(-1), rows[1]


def other_types(kept, x):
    kept.bits = np.ones(4, dtype=np.float32).view(np.int32)
    kept.halves = np.arange(4, dtype=np.int64).view(np.int32)[1::2]


def read_only(kept, x):
    kept.a = np.arange(4)
    kept.a.flags.writeable = False
    kept.b = np.arange(4)[1:]
    kept.b.setflags(write=False)


def views_of_an_outside_array(kept, x):
    kept.part, kept.turned, kept.flat = kept.outside[1:], kept.outside.T, kept.outside.reshape(-1)


def in_containers(kept, x):
    rows = np.arange(8).reshape(2, 4)
    kept.list, kept.table = [rows[0], rows[1]], {"rows": rows, "one": (rows[:, 1],)}


STEPS = (
    views, views_of_one, views_of_one_that_is_gone, other_types, read_only, views_of_an_outside_array, in_containers,
)  # fmt: skip


def arrays_of(value):
    if isinstance(value, np.ndarray):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [array for item in items for array in arrays_of(item)]


def facts(array):
    return array.tolist(), str(array.dtype), array.strides, array.flags.writeable, array.flags.owndata


@pytest.mark.parametrize("body", STEPS, ids=lambda body: body.__name__)
def test_arrays_left_behind(body):
    found = []
    for compiled in (False, True):
        kept = SimpleNamespace(outside=np.arange(6.0).reshape(2, 3))

        def step(x, kept=kept):
            body(kept, x)
            return x * 2

        run = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise") if compiled else step
        for _ in range(3):
            run(torch.ones(2))
            arrays = arrays_of(vars(kept))
            shared = [[np.may_share_memory(a, b) for b in arrays] for a in arrays]
            for array in arrays:
                if array.flags.writeable:  # each call starts from others, and views show what is written
                    array += 1
            found.append((list(map(facts, arrays)), shared))
    assert found[:3] == found[3:]


def test_arrays_of_a_library_that_change():
    """What a library's function makes of arrays that change is computed before the graph."""
    buffer = SimpleNamespace(a=np.zeros((4, 2, 3)), b=np.zeros((4, 2, 1)), c=np.zeros((4, 2)))

    def flatten(array):
        shape = array.shape if len(array.shape) > 2 else (*array.shape, 1)
        return array.swapaxes(0, 1).reshape(shape[0] * shape[1], *shape[2:])

    flatten.__module__ = "numpy.of_a_library"

    def step(x):
        for name in ("a", "b", "c"):
            buffer.__dict__[name] = flatten(buffer.__dict__[name])
        return (x * torch.tensor(buffer.a)).sum() + torch.tensor(buffer.b).sum() * torch.tensor(buffer.c).sum()

    run = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise")
    x, made = torch.rand(8, 3, dtype=torch.float64), np.random.default_rng(0)
    for _ in range(12):
        start = made.normal(size=(4, 2, 3)), made.normal(size=(4, 2, 1)), made.normal(size=(4, 2))
        results = []
        for each in (step, run):
            buffer.a, buffer.b, buffer.c = (array.copy() for array in start)
            results.append((each(x).item(), [array.tolist() for array in vars(buffer).values()]))
        assert results[0] == results[1]
    assert len(run.report().captures) <= 4


@pytest.mark.parametrize(
    "compare", [lambda k, t: k > t, lambda k, t: t >= k, lambda k, t: k != t], ids=["less", "at_least", "other"]
)
def test_compared_with_a_number(compare):
    """A number in an array over a tensor, and the array in a list that is still alive where the step ends in parts."""
    losses = []

    def step(x):
        found = []
        for factor in (1.0, 2.0):
            with torch.no_grad():
                divergence = (x * factor).mean().numpy()
                found.append(divergence)
            if compare(divergence, 0.3):
                break
        losses.append(np.mean(found))
        return x * len(found)

    run = sidefx_train.compile(step, backend="eager", keep_slower=True)
    for value in (0.3, 0.2, 0.1, 0.15, 0.5, 0.45, 0.3, 0.1):
        x = torch.full((3,), value)
        torch.testing.assert_close(run(x), step(x), rtol=0, atol=0)
        (a, b), losses[:] = losses[-2:], []
        assert type(a) is type(b) and a == b
    assert {record.code for record in run.report().breaks} <= {"SFX101", "SFX104"}
    assert not run.report().fallbacks
