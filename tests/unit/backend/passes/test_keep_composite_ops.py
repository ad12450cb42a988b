"""Composite operators that stay whole: layer norms where nothing would be fused, windows, flips, rolls, complex ops."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from sidefx_train.compile.backend.passes import keep_composite_ops as whole
from tests.support.disk_cache import new_cache


@pytest.fixture(autouse=True)
def everything_is_large(tmp_path, monkeypatch):
    new_cache(tmp_path, monkeypatch)
    monkeypatch.setattr(whole, "_FEWEST", 64)
    monkeypatch.setattr(whole, "_FEWEST_WINDOWS", 64)


def trained(forward, *modules, x, config=None):
    """Returns eager's and compiled results: result, gradients after two steps; and the notes of the report."""
    found = []
    for compiles in (False, True):
        given = x.detach().clone().requires_grad_(x.requires_grad)
        parameters = [p for m in modules for p in m.parameters()]

        def step(given=given, parameters=parameters):
            given.grad = None
            for p in parameters:
                p.grad = None
            out = forward(given)
            (out * out.detach().cos()).sum().backward() if out.requires_grad else None
            return out.detach().clone()

        run = sidefx_train.compile(step, fullgraph=True, **(config or {})) if compiles else step
        outs = [run(), run()]
        found.append([*outs, given.grad, *(p.grad for p in parameters)])
    return *found, run.report().captures[0].notes


def count(notes):
    return sum(int(note.split()[0]) for note in notes if note.endswith("composite operators kept whole"))


def assert_equal(have, want, exactly):
    for a, b in zip(have, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-4, "atol": 1e-5}))


ALONE = {
    "rows": lambda: nn.LayerNorm(32),
    "two dimensions": lambda: nn.LayerNorm((6, 32)),
    "without bias": lambda: nn.LayerNorm(32, bias=False),
    "without weight": lambda: nn.LayerNorm(32, elementwise_affine=False),
    "another epsilon": lambda: nn.LayerNorm(32, eps=0.125),
}


@pytest.mark.parametrize("needs_grad", [True, False], ids=["gradient of x", "none"])
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.every(4)
def test_alone_it_is_what_eager_calls(name, needs_grad):
    torch.manual_seed(0)
    norm, product = ALONE[name](), nn.Linear(32, 8, bias=False)
    for p in norm.parameters():
        nn.init.normal_(p)
    x = torch.randn(5, 6, 32, requires_grad=needs_grad)
    want, have, notes = trained(lambda given: product(norm(given)), norm, product, x=x)
    backward = needs_grad or any(p.requires_grad for p in norm.parameters())
    assert count(notes) == 1 + backward
    assert_equal(have, want, exactly=False)


@pytest.mark.parametrize("bias", [False, True], ids=["", "a bias, for which the gradient is added up"])
def test_between_products(bias):
    torch.manual_seed(0)
    first, norm, second = nn.Linear(24, 32, bias=bias), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(x):
        return second(norm(first(x).view(3, 10, 32)).view(30, 32)).tanh()

    want, have, notes = trained(forward, first, norm, second, x=torch.randn(30, 24))
    assert_equal(have, want, exactly=False)
    assert count(notes) == 2 - bias


def test_all_that_it_returns_is_exact():
    torch.manual_seed(0)
    norm, grad = nn.LayerNorm(32), torch.randn(9, 32)
    x = torch.randn(9, 32, requires_grad=True)

    def step():
        x.grad, norm.weight.grad, norm.bias.grad = None, None, None
        out = norm(x)
        out.backward(grad)
        return out.detach()

    compiled = sidefx_train.compile(step, fullgraph=True)
    want = [step(), x.grad, norm.weight.grad, norm.bias.grad]
    have = [compiled(), x.grad, norm.weight.grad, norm.bias.grad]
    assert count(compiled.report().captures[0].notes) == 2
    assert_equal(have, want, exactly=True)


FUSED = {
    "a residual before": lambda norm, f, g: lambda x: g(norm(x + f(x))),
    "a residual behind": lambda norm, f, g: lambda x: g(norm(f(x)) + x),
    "an activation": lambda norm, f, g: lambda x: g(F.gelu(norm(f(x)))),
    "a view and an activation": lambda norm, f, g: lambda x: g(F.relu(norm(f(x)).t()).t()),
    "what reads it again": lambda norm, f, g: lambda x: (lambda y: g(y) * y)(norm(f(x))),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.every(2)
def test_decomposed_where_something_is_fused(name):
    torch.manual_seed(0)
    norm, f, g = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)
    want, have, notes = trained(FUSED[name](norm, f, g), norm, f, g, x=torch.randn(8, 32, requires_grad=True))
    assert count(notes) < 2, "its forward or its backward at least"
    assert_equal(have, want, exactly=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_decomposed(dtype):
    norm = nn.LayerNorm(32, dtype=dtype)
    x = torch.randn(8, 32, dtype=dtype, requires_grad=True)
    assert not count(trained(norm, norm, x=x)[2])


@pytest.mark.slow
def test_small_ones_are_decomposed(monkeypatch):
    monkeypatch.setattr(whole, "_FEWEST", 8 * 32 + 1)
    norm = nn.LayerNorm(32)
    want, have, notes = trained(norm, norm, x=torch.randn(8, 32, requires_grad=True))
    assert not count(notes)
    assert_equal(have, want, exactly=False)


def test_symbolic_sizes_are_decomposed():
    norm, product = nn.LayerNorm(32), nn.Linear(32, 4)
    compiled = sidefx_train.compile(lambda x: product(norm(x)), fullgraph=True, dynamic=True)
    for rows in (5, 7, 9):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x), product(norm(x)))
    assert not count(compiled.report().captures[-1].notes)


def test_from_the_cache():
    torch.manual_seed(0)
    norm = nn.LayerNorm(32)
    x = torch.randn(8, 32)
    first, second = (sidefx_train.compile(lambda given: norm(given), fullgraph=True) for _ in range(2))
    assert torch.equal(first(x), norm(x)) and torch.equal(second(x), norm(x))


GRID = torch.rand(2, 6, 5, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
WINDOWS = {
    "unfold an image": ((2, 3, 8, 8), lambda x: F.unfold(x, 3, padding=1, stride=2), 2),
    "fold": ((2, 27, 16), lambda x: F.fold(x, (8, 8), 3, padding=1, stride=2), 2),
    "unfold a sequence": ((4, 32), lambda x: x.unfold(1, 8, 4) * 2, 1),
    "sample at a grid": ((2, 3, 8, 8), lambda x: F.grid_sample(x, GRID, align_corners=False), 1),
    "the nearest": ((2, 3, 8, 8), lambda x: F.grid_sample(x, GRID, mode="nearest", align_corners=True), 1),
    "flip": ((4, 32), lambda x: x.flip(1).exp(), 2),
    "flip all": ((4, 32), lambda x: x.flip((0, -1)) + 1, 2),
    "flip what is contiguous": ((4, 32), lambda x: x.t().flip(0) * 3, 2),
    "roll": ((4, 32), lambda x: x.roll(3, 1) * x, 2),
    "roll two": ((4, 32), lambda x: x.roll((1, 5), (0, 1)).tanh(), 2),
    "roll all": ((4, 32), lambda x: x.roll(7) * 2, 2),
    "cumulative sum": ((4, 32), lambda x: x.cumsum(1), 2),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.every(3)
def test_windows_and_reversed_dimensions(name):
    shape, net, expected = WINDOWS[name]
    torch.manual_seed(0)
    want, have, notes = trained(net, x=torch.randn(shape, requires_grad=True))
    assert count(notes) == expected
    assert_equal(have, want, exactly=False)


APART = {
    "flip rows": lambda x: x.flip(0).exp(),
    "roll rows": lambda x: x.roll(1, 0) * 2,
    "flip nothing": lambda x: x.flip(()) * 2,
    "flip what is not contiguous": lambda x: x.t().flip(1) * 2,
}


@pytest.mark.parametrize("name", APART)
def test_whole_rows_are_copied_by_loops(name):
    torch.manual_seed(0)
    want, have, notes = trained(APART[name], x=torch.randn(4, 32, requires_grad=True))
    assert not count(notes)
    assert_equal(have, want, exactly=False)


def test_small_windows_are_decomposed(monkeypatch):
    monkeypatch.setattr(whole, "_FEWEST_WINDOWS", 1 << 20)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    want, have, notes = trained(lambda given: F.unfold(given.flip(3), 3), x=x)
    assert not count(notes)
    assert_equal(have, want, exactly=False)


def into_zeros(x):
    """Writes a part of complex zeros, and returns all of them."""
    whole = torch.zeros(4, 40, dtype=torch.complex64)
    whole[:, 3 : 3 + x.shape[1]] = x
    return whole


COMPLEX = {
    "spectrum": lambda x: torch.fft.rfft(x).abs(),
    "a power of it": lambda x: torch.fft.rfft(x).abs().pow(0.3).log1p(),
    "over columns": lambda x: torch.fft.rfft(x, dim=0).abs(),
    "of two dimensions": lambda x: torch.fft.rfft2(x).abs(),
    "short-time": lambda x: torch.stft(x, 16, 4, window=torch.hann_window(16), return_complex=True).abs(),
    "there and back": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1]),
    "a part": lambda x: torch.fft.fft(x)[:, 3:9].abs(),
    "every other": lambda x: torch.fft.fft(x)[:, 1::2].abs(),
    "channels last": lambda x: torch.fft.fft2(x.view(1, 2, 8, 8).to(memory_format=torch.channels_last))[..., 1:].abs(),
    "what is put in place": lambda x: torch.fft.ifft(F.pad(torch.fft.fft(x)[:, 2:7], (2, 3))).real,
    "into zeros": lambda x: into_zeros(torch.fft.fft(x)).real.square(),
    "of numbers that are real": lambda x: into_zeros(x).real,
    "a column": lambda x: torch.fft.fft(x)[:, 5].abs(),
    "signs": lambda x: torch.sgn(torch.fft.fft(x)).real,
}


OFTEN = ("spectrum", "short-time", "there and back", "channels last", "what is put in place", "signs")
"""Always run: the other ways take about ten seconds each for torch's headers and test the same (``make slow``)."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in COMPLEX]
)
@pytest.mark.filterwarnings("error:Torchinductor does not support code generation for complex")
@pytest.mark.every(3)
def test_complex_numbers(name):
    torch.manual_seed(0)
    want, have, _ = trained(COMPLEX[name], x=torch.randn(4, 32, requires_grad=True))
    assert_equal(have, want, exactly=False)


@pytest.mark.filterwarnings("error:Torchinductor does not support code generation for complex")
def test_complex_parts_are_one_call():
    x = torch.randn(4, 32, requires_grad=True)

    def step():
        x.grad = None
        torch.fft.rfft(x).abs().sum().backward()

    compiled = sidefx_train.compile(step, fullgraph=True)
    compiled()
    text = compiled.report().sources()["graph"]
    assert "aten.sgn" in text and "sidefx.zeros_around" in text
    assert "slice_scatter" not in text and "aten.where" not in text
