"""Warnings that torch's C++ code issues: as in eager, where docs/limits.md names no difference.

Some are issued once per process, so each run is a process of its own.
"""

from __future__ import annotations

import os
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sidefx_train
from sidefx_train.errors import SideFXWarning

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="each run is a forked process")


def resized_output(x):
    out = torch.empty(1)
    torch.add(x, 1, out=out)
    return out


def softmax_without_dim(x):
    return F.softmax(x)


def scheduler_before_optimizer(x):
    parameter = torch.nn.Parameter(x.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.step()
    parameter.sum().backward()
    optimizer.step()
    return parameter.detach()


def mismatched_loss(x):
    return F.mse_loss(x, x[:1])


def byte_mask(x):
    return x[torch.ones(2, dtype=torch.uint8)].sum()


def reversed_dimensions(x):
    return x.reshape(2, 1, 3).T.sum()


def range_with_end(x):
    return torch.range(0, 3).sum() + x.sum()


def cross_without_dim(x):
    return torch.cross(x, x).sum()


EQUAL = [resized_output, softmax_without_dim, scheduler_before_optimizer, mismatched_loss, byte_mask]
"""Equal in category, text, file and line, at every call, also where a filter makes them errors."""
ONCE = [reversed_dimensions, range_with_end, cross_without_dim]
"""Issued while the step is captured, with eager's category and text."""


def run(fn, compiled, action) -> list[Any]:
    step = sidefx_train.compile(fn, backend="eager") if compiled else fn
    found: list[Any] = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as issued:
            warnings.simplefilter(action)
            warnings.filterwarnings("ignore", category=SideFXWarning)
            try:
                outcome = step(torch.arange(6.0).reshape(2, 3) + 1).tolist()
            except UserWarning as warning:
                outcome = str(warning)
        found.append((outcome, [(w.category.__name__, str(w.message), w.filename, w.lineno) for w in issued]))
    return found


def in_a_fork(*given) -> list[Any]:
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads
        child = os.fork()
    if child == 0:
        try:
            with os.fdopen(write, "wb") as file:
                file.write(pickle.dumps(run(*given)))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    assert data, "the process failed"
    return pickle.loads(data)  # type: ignore[no-any-return]


@pytest.mark.parametrize("action", ["always", "error"])
@pytest.mark.parametrize("fn", EQUAL, ids=lambda fn: fn.__name__)
def test_equal(fn, action):
    expected = in_a_fork(fn, False, action)
    assert in_a_fork(fn, True, action) == expected
    assert any(issued for _, issued in expected) == (action == "always")


@pytest.mark.parametrize("fn", ONCE, ids=lambda fn: fn.__name__)
def test_issued_by_the_capture(fn):
    (outcome, expected), *_ = in_a_fork(fn, False, "always")
    (found, issued), *later = in_a_fork(fn, True, "always")
    assert found == outcome
    assert [each[:2] for each in issued] == [each[:2] for each in expected] != []
    assert all(not again for _, again in later)
