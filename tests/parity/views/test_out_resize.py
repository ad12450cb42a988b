"""``out=`` with elements, of another size than the result: torch resizes it and warns."""

from __future__ import annotations

import warnings

import pytest
import torch

import sidefx_train
from tests.opinfo.compare import same_contents
from tests.support.parity import Program, parity

CAPTURED = {
    "smaller": lambda x, y, z: torch.sin(y[0], out=x),
    "larger": lambda x, y, z: torch.cat([y, y], out=z),
    "as many elements": lambda x, y, z: torch.sin(y.view(2, 6), out=z),
    "with the strides of the result": lambda x, y, z: torch.sin(y.t(), out=z),
    "larger, of the step": lambda x, y, z: torch.sin(y, out=torch.zeros(2)),
    "smaller, of the step": lambda x, y, z: torch.sin(y[0], out=torch.zeros(3, 4)),
    "a transposed one": lambda x, y, z: torch.sin(y[0], out=torch.zeros(3, 4).t()),
    "a part": lambda x, y, z: torch.sin(y[0], out=x[1]),
    "two": lambda x, y, z: torch.max(y, 0, out=(x, torch.zeros(1, dtype=torch.int64)))[0],
    "one of two": lambda x, y, z: torch.max(y, 0, out=(x, torch.zeros(4, dtype=torch.int64)))[0],
    "a product": lambda x, y, z: torch.mm(y, y.t(), out=x),
    "a sum": lambda x, y, z: torch.sum(y, 0, out=z),
    "a running sum": lambda x, y, z: torch.cumsum(y, 0, out=z),
    "one of two values": lambda x, y, z: torch.where(y.t() > 3, y.t(), y.t().sin(), out=z),
    "picked": lambda x, y, z: torch.index_select(y, 0, torch.tensor([0, 1]), out=z),
    "stacked": lambda x, y, z: torch.stack([y, y], out=torch.zeros(2)),
    "sorted": lambda x, y, z: torch.sort(y, out=(z, torch.zeros(1, dtype=torch.int64)))[0],
    "the greatest": lambda x, y, z: torch.topk(y, 2, out=(z, torch.zeros(1, dtype=torch.int64)))[0],
    "a norm": lambda x, y, z: torch.linalg.vector_norm(y, dim=0, out=z),
    "clipped": lambda x, y, z: torch.clamp(y, 0, 1, out=torch.ones(2)),
    "twice": lambda x, y, z: torch.sin(y, out=torch.sin(y[0], out=z)),
}
UNDER_INDUCTOR = ("smaller", "with the strides of the result", "a part", "two", "twice")
"""One of each kind; the others have the same effect on the argument by another kernel."""
LEFT = {
    "of another type": lambda x, y, z: torch.add(y[0], 1, out=z.double()),
    "a view that is too small": lambda x, y, z: torch.cat([y, y], out=x),
    "of unknown size": lambda x, y, z: torch.masked_select(y, y > 3, out=z),
}


def _results(call):
    x, y, z = torch.arange(10.0).view(2, 5), torch.arange(12.0).view(3, 4), torch.arange(12.0)
    before = x.view(-1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made, read = call(x, y, z)
    seen = [(str(w.message), w.filename, w.lineno) for w in said if "An output" in str(w.message)]
    tensors = (made, read, x, y, z, before)
    facts = [(t.stride(), t.storage_offset(), t.untyped_storage().nbytes(), t._version) for t in tensors]
    shared = [t.untyped_storage().data_ptr() == made.untyped_storage().data_ptr() for t in tensors]
    return seen, facts, shared, [made is t for t in tensors], [t.clone() for t in tensors]


def _hold_equal(make, backend, whole):
    def step(x, y, z):
        return make(x, y, z), x * 1

    compiled = sidefx_train.compile(step, backend=backend, fullgraph=whole, on_failure="raise" if whole else "eager")
    for _ in range(3):
        want, have = _results(step), _results(compiled)
        assert want[0] and want[0] == have[0]
        assert want[:4] == have[:4]
        alike = torch.allclose if backend == "inductor" else same_contents
        assert all(alike(a, b) for a, b in zip(want[4], have[4], strict=True))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=pytest.mark.slow if late else (), id=f"{name}-{backend}")
        for name in CAPTURED
        for backend in ("eager", "aot_eager", "inductor")
        for late in [backend == "inductor" and name not in UNDER_INDUCTOR]
    ],
)
@pytest.mark.every(6)
def test_captured(name, backend):
    _hold_equal(CAPTURED[name], backend, whole=True)


@pytest.mark.parametrize("name", LEFT)
def test_left_to_eager(name):
    _hold_equal(LEFT[name], "aot_eager", whole=False)


def test_operators_stay_the_objects_they_are():
    """Tables of operators, torch's and ours, find them by identity."""
    product = torch.ops.aten.mm.default
    _hold_equal(CAPTURED["a product"], "aot_eager", whole=True)
    assert torch.ops.aten.mm.default is product


def test_kernels_whose_stand_ins_leave_an_empty_output_as_it_is():
    def step(values, counts, edges):
        torch.histogram(values, 3, out=(counts, edges))
        return counts * 1

    compiled = sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")
    for start in (0.0, 1.0):
        outs = [(torch.zeros(3), torch.zeros(4)) for _ in range(2)]
        values = torch.arange(start, start + 5)
        assert torch.equal(step(values, *outs[0]), compiled(values, *outs[1]))
        assert all(map(torch.equal, *outs))


@pytest.mark.parametrize("empty", ["outside", "of the step"])
@pytest.mark.parametrize("name", ["geqrf", "solve", "triangular_solve", "batch_norm"])
def test_every_empty_output_of_an_operator_with_several_is_filled(name, empty):
    """Regression: the second capture found the sizes from before the call in torch's cache of fake results; the fake
    kernel of ``geqrf`` leaves the sizes as they are."""

    def step(square, b, *outs):
        outs = outs or tuple(torch.empty(0) for _ in range(3))
        if name == "geqrf":
            torch.geqrf(square, out=outs[:2])
        elif name == "solve":
            torch.linalg.solve(square, b, out=outs[0])
        elif name == "triangular_solve":
            torch.triangular_solve(b, square, out=outs[:2])
        else:
            given = square[None], None, None, None, None, True, 0.1, 1e-5
            torch.ops.aten.native_batch_norm.out(*given, out=outs[0], save_mean=outs[1], save_invstd=outs[2])
        return [(out.shape, out * 2) for out in outs]

    torch.manual_seed(0)
    square, b = torch.randn(4, 4), torch.randn(4, 2)
    for _ in range(3):  # each captures the step again
        compiled = sidefx_train.compile(step, backend="eager", warmup="now")
        mine, eager = ([torch.empty(0) for _ in range(3 if empty == "outside" else 0)] for _ in range(2))
        for have, want in zip(compiled(square, b, *mine), step(square, b, *eager), strict=True):
            assert have[0] == want[0] and torch.equal(have[1], want[1]) and have[1].stride() == want[1].stride()
        assert all(map(torch.equal, mine, eager))


@pytest.mark.parametrize("size", [(0,), (3,), (1,)])
def test_operators_that_write_no_fake_output_write_it(size):
    """Regression: ``matrix_rank`` resized the output and wrote nothing to it; its memory was that of another tensor."""

    def step(square, out):
        return torch.linalg.matrix_rank(square, out=out), out * 2

    compiled = sidefx_train.compile(step, backend="eager", warmup="now")
    for rank in (2, 3):
        outs = [torch.full(size, 7) for _ in range(2)]
        square = torch.eye(4)[:, :rank] @ torch.ones(rank, 4).triu()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            have, want = compiled(square, outs[0]), step(square, outs[1])
        assert all(map(torch.equal, have, want)) and torch.equal(*outs) and have[0] is outs[0]


@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("function", ["eye", "linspace", "logspace"])
def test_functions_that_make_tensors_fill_an_empty_one(function, size):
    def step(x):
        given = (size,) if function == "eye" else (0, 1, size)
        out = getattr(torch, function)(*given, out=torch.empty(0, dtype=torch.float64))
        return out, x + 1

    parity(lambda: Program(step, lambda index: (torch.ones(2),), ()), steps=3)
