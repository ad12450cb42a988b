"""Errors that a step catches: of the class and with the text that eager raises."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from torch.utils import _pytree as pytree

import sidefx_train
from tests.opinfo.run import operators
from tests.support.parity import Program, parity

CALLS = {
    "a tensor in place of a number": lambda x, n: torch.eq(3, x),
    "text": lambda x, n: torch.hsplit(x, "two"),
    "a tensor in place of a list": lambda x, n: torch.cat(x, x),
    "a parameter": lambda x, n: torch.cat(torch.nn.Parameter(x.detach()), 0),
    "a changing number": lambda x, n: torch.hsplit(x, n + 0.5),
    "a number in place of a tensor": lambda x, n: torch.stack([x, n]),
    "result of another dtype": lambda x, n: torch.amax(x, 0, out=torch.empty(4, dtype=torch.int32)),
}


@pytest.mark.parametrize("call", CALLS)
def test_messages(call):
    def make() -> Program:
        texts: list = []

        def step(x, n):
            try:
                CALLS[call](x, n)
            except Exception as error:
                texts.append((type(error).__name__, str(error)))
            return x * n

        return Program(step, lambda index: (torch.randn(4, 4), index * 0.5), (texts,))

    parity(make, steps=4, captures=None, whole=False)


def invalid_inputs():
    """Yields an operator's name and arguments that it must refuse, of torch's own list."""
    for op in operators().values():
        for index, found in enumerate(op.error_inputs("cpu") if op.error_inputs_func is not None else ()):
            sample = found.sample_input
            yield f"{op.full_name} {index}", functools.partial(_call, op.op), (sample.input, sample.args, sample.kwargs)


def _call(op, layout, *given):
    first, args, kwargs = pytree.tree_unflatten(given, layout)
    try:
        op(first, *args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none"


@pytest.mark.slow
def test_inputs_that_operators_refuse():
    different = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, call, arguments in invalid_inputs():
            given, layout = pytree.tree_flatten(arguments)
            plain = [isinstance(value, torch.Tensor) and value.layout is torch.strided for value in given]

            def fresh(given=given, plain=plain):
                return [copy.deepcopy(v.detach()) if known else v for v, known in zip(given, plain, strict=True)]

            run = sidefx_train.compile(functools.partial(call, layout), backend="eager", warmup="now")
            want = call(layout, *fresh())
            if any(run(*fresh()) != want for _ in range(2)):
                different.append(name)
    assert not different
