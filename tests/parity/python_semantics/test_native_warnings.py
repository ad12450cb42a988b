"""Warnings that torch's C++ code issues: as in eager, where docs/limits.md names no difference.

Some are issued once per process, so each run is a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sidefx_train
from sidefx_train.compile.capture.world.native_calls import cpp_warnings
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


def gradient_of_no_leaf(x):
    return x.clone().requires_grad_().mul(2).grad is None


def gradients_of_no_leaves(x):
    y, z = x.clone().requires_grad_().mul(2), x.clone().requires_grad_().mul(3)
    return y.grad is z.grad


def gradient_in_a_hook(x):
    y = x.clone().requires_grad_().mul(2)

    def look(gradient):
        with warnings.catch_warnings():
            return gradient * (2 if y.grad is None else 3)

    y.register_hook(look)
    (found,) = torch.autograd.grad((y * y).sum(), y)
    return found


EQUAL_AT_FIRST = [reversed_dimensions, range_with_end, cross_without_dim, gradient_of_no_leaf]
"""Equal at the first call; whether later calls warn is not known."""


ARRAY = np.arange(3.0)


def part_of_an_array(x):
    return torch.as_tensor(ARRAY[1:]).sum() + x.sum()


def run(fn, compiled, action) -> list[Any]:
    cpp_warnings._MET.clear()  # what the tests before have met
    step = sidefx_train.compile(fn, backend="eager") if compiled else fn
    found: list[Any] = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as issued:
            warnings.simplefilter(action)
            warnings.filterwarnings("ignore", category=SideFXWarning)
            try:
                outcome = step(torch.arange(6.0).reshape(2, 3) + 1)
                outcome = outcome.tolist() if isinstance(outcome, torch.Tensor) else outcome
            except UserWarning as warning:
                outcome = str(warning)
        found.append((outcome, [(w.category.__name__, str(w.message), w.filename, w.lineno) for w in issued]))
    return found


@cache
def server() -> Any:
    """Returns what makes processes that have imported torch and issued none of its warnings.

    A fork of this process could not run a backward if an earlier test has made threads of the engine.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def answer(write, *given) -> None:
    try:
        write.send(run(*given))
    except BaseException:
        write.send(traceback.format_exc())


def in_a_process(*given) -> list[Any]:
    read, write = server().Pipe(duplex=False)
    child = server().Process(target=answer, args=(write, *given))
    child.start()
    write.close()
    try:
        found = read.recv()
    finally:
        child.join()
    assert type(found) is list, found
    return found


@pytest.mark.parametrize("action", ["always", "error"])
@pytest.mark.parametrize("fn", EQUAL, ids=lambda fn: fn.__name__)
@pytest.mark.every(2)
def test_equal(fn, action):
    expected = in_a_process(fn, False, action)
    assert in_a_process(fn, True, action) == expected
    assert any(issued for _, issued in expected) == (action == "always")


@pytest.mark.parametrize("fn", EQUAL_AT_FIRST, ids=lambda fn: fn.__name__)
@pytest.mark.every(2)
def test_equal_at_the_first_call(fn):
    first, *later = in_a_process(fn, False, "always")
    assert in_a_process(fn, True, "always") == [first, *((outcome, []) for outcome, _ in later)]
    assert first[1]


@pytest.mark.parametrize("fn", [gradients_of_no_leaves, gradient_in_a_hook])
def test_equal_at_every_call_if_it_comes_again(fn):
    expected = in_a_process(fn, False, "always")
    assert in_a_process(fn, True, "always") == expected
    assert all(issued for _, issued in expected)


def test_tensors_of_arrays_from_outside_do_not_warn():
    """Regression: the capture sees read-only copies of them, for which torch has a warning."""
    expected = in_a_process(part_of_an_array, False, "always")
    assert in_a_process(part_of_an_array, True, "always") == expected
    assert not any(issued for _, issued in expected)
