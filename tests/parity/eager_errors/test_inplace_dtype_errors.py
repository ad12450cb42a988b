"""Writes that eager refuses for their dtypes: lists of tensors, ``out=`` and in-place operations of several types.

A captured step must not leave partial writes either, other than those that eager made before it raised.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import sidefx_train
from tests.opinfo.compare import same_contents

TYPES = (torch.bool, torch.int32, torch.float32, torch.float64, torch.complex64)

LISTS = {
    "tensors": lambda name, a, b: getattr(torch, f"_foreach_{name}_")([torch.ones(1), a], [b, b]),
    "one number": lambda name, a, b: getattr(torch, f"_foreach_{name}_")([torch.ones(1), a], b.tolist()[1]),
    "numbers": lambda name, a, b: getattr(torch, f"_foreach_{name}_")([a, a * 1], b.tolist()[:2]),
    "one tensor": lambda name, a, b: getattr(torch, f"_foreach_{name}_")([a, a * 1], b[1]),
}
TERNARY = {
    "addcmul": lambda a, b: torch._foreach_addcmul_([torch.ones(3), a], [b, b], [b, b]),
    "addcdiv": lambda a, b: torch._foreach_addcdiv_([a], [b], [b], 2.0),
    "lerp": lambda a, b: torch._foreach_lerp_([a], [b], 0.5),
    "sqrt": lambda a, b: torch._foreach_sqrt_([b, a]),
    "norms": lambda a, b: torch._foreach_norm([a, b]),
    "cumsum_": lambda a, b: a.cumsum_(0),
}
OUTS = {
    "any": lambda a, b: torch.any(b, 0, keepdim=True, out=a[:1]),
    "take": lambda a, b: torch.take(b, torch.tensor([0, 1, 2]), out=a),
    "index_select": lambda a, b: torch.index_select(b, 0, torch.tensor([0, 1, 2]), out=a),
    "clamp": lambda a, b: torch.clamp(b, 0, 1, out=a),
    "heaviside": lambda a, b: torch.heaviside(b, b, out=a),
    "sin": lambda a, b: torch.sin(b, out=a),
    "cat": lambda a, b: torch.cat([b[:1], b[1:]], out=a),
    "max": lambda a, b: torch.max(b, 0, keepdim=True, out=(a[:1], torch.empty(1, dtype=torch.int64))),
    "nonzero": lambda a, b: torch.nonzero(b, out=a.view(3, 1)[:2]),
}


def _given(dtype):
    return (torch.arange(1, 4) % 3).to(dtype)


def _left(step, first, second):
    """Returns a step's error, and the arguments after the step."""
    given = _given(first), _given(second)
    try:
        step(*given)
        said = ""
    except (RuntimeError, TypeError) as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return said, [t._version for t in given], given


def _hold_equal(step):
    refused = 0
    for first in TYPES:
        for second in TYPES:
            compiled = sidefx_train.compile(step, backend="aot_eager")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                want, have = _left(step, first, second), _left(compiled, first, second)
            assert want[:2] == have[:2], (first, second)
            assert all(same_contents(a, b) for a, b in zip(want[2], have[2], strict=True)), (first, second)
            refused += bool(want[0])
    return refused


@pytest.mark.parametrize("operands", LISTS)
@pytest.mark.parametrize(
    "name", ["add", "div", "clamp_max", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mul", "pow"))]
)
@pytest.mark.covering(1)
def test_lists(name, operands):
    assert _hold_equal(lambda a, b: LISTS[operands](name, a, b)) > 0


@pytest.mark.parametrize("name", TERNARY)
@pytest.mark.every(2)
def test_of_several_operands(name):
    _hold_equal(TERNARY[name])


@pytest.mark.parametrize("name", OUTS)
@pytest.mark.every(3)
def test_out(name):
    _hold_equal(OUTS[name])


def test_what_fits_is_captured():
    """Compatible types in a list, and in ``out=``."""

    def step(a, b, c):
        torch._foreach_add_([a, c], [b, b])
        torch._foreach_mul_([c, a], 2)
        return torch.add(a, b, out=torch.empty(3, dtype=torch.float64)), torch.any(b, 0, out=torch.tensor(False))

    def given():
        return _given(torch.float64), _given(torch.int32), _given(torch.complex64)

    compiled = sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")
    expected, left = given(), given()
    for want, have in zip((*step(*expected), *expected), (*compiled(*left), *left), strict=True):
        assert same_contents(want, have)
