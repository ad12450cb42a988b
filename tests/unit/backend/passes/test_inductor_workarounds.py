"""Inductor bugs: multiples in sums with matrix products, types of running sums, integer powers."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train

SUMS = {
    "added to a product": lambda x, a, b: torch.add(a @ b, x, alpha=0.1),
    "a product added": lambda x, a, b: x.add(a @ b, alpha=-0.1),
    "subtracted": lambda x, a, b: x.sub(a @ b, alpha=3),
    "in place": lambda x, a, b: x.clone().add_(a @ b, alpha=2),
    "a number": lambda x, a, b: torch.add(a @ b, 3, alpha=2),
    "a mask": lambda x, a, b: torch.add(a @ b, x > 0, alpha=2),
    "of another type": lambda x, a, b: torch.add(x.double(), a @ b, alpha=0.1),
    "numbers": lambda x, a, b: torch.add(x.long(), b.long()[:1], alpha=3),
}


@functools.cache
def summed(dtype, autotune):
    """Returns eager's and the captured results of every sum, from one step; each has its own inputs and product."""
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: [torch.randn(*size, generator=generator, dtype=dtype) for size in ((8, 5), (8, 6), (6, 5))]
        for name in SUMS
    }

    def step(inputs):
        return {name: SUMS[name](*inputs[name]) for name in SUMS}

    return step(inputs), sidefx_train.compile(step, autotune=autotune, on_failure="raise")(inputs)


@pytest.mark.parametrize("autotune", ["off", "on"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SUMS)
def test_sum(name, dtype, autotune):
    wanted, found = summed(dtype, autotune)
    torch.testing.assert_close(found[name], wanted[name])


def test_update_written_by_hand():
    """A gradient is a product, and the update a sum with a multiple of it: Inductor dropped the learning rate."""

    def trained(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3, bias=False))

        def step(x):
            gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.add_(gradient, alpha=-0.1)

        run = sidefx_train.compile(step, autotune="off", fullgraph=True) if compiled else step
        for _ in range(3):
            run(torch.randn(5, 6))
        return [parameter.detach() for parameter in model.parameters()]

    torch.testing.assert_close(trained(True), trained(False))


TYPES = {
    "floats": lambda i: torch.ones(3, 5).cumsum(1, dtype=torch.float64),
    "integers": lambda i: torch.ones(4).cumsum(0, dtype=torch.int32) + i[:4],
    "that overflow": lambda i: torch.full((3,), 200, dtype=torch.uint8).cumsum(0, dtype=torch.uint8),
    "of a mask": lambda i: torch.ones(4, dtype=torch.bool).cumsum(0),
    "power of 2": lambda i: 2**i + 1,
    "power of another": lambda i: (-3) ** i.int() * 2,
    "power in floating point": lambda i: 2.0**i,
    "frequencies": lambda i: (2 ** torch.arange(4)).float() * 3.0,
}


@functools.cache
def typed():
    """Returns eager's and the captured results of every function, from one step."""

    def step(i):
        return {name: TYPES[name](i) for name in TYPES}

    given = torch.arange(5)
    return step(given), sidefx_train.compile(step, on_failure="raise")(given)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.every(2)
def test_type(name):
    wanted, found = typed()
    torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=0)


COMPLEX = {
    "product": lambda z: z * 0.5,
    "quotient": lambda z: 1.0 / z + z / 3.0,
    "sums": lambda z: (0.5 - z) + 1j,
    "multiple": lambda z: torch.rsub(z, 0.5, alpha=0.3),
    "real": lambda z: z.real * 1j,
    "integers": lambda z: torch.arange(3) * 1j,
    "mean": lambda z: torch.stack([z, z * 2]).mean() * 0.3,
    "scaled bias": lambda z: torch.addmv(z, z * torch.ones(3, 4), z * torch.ones(4), beta=0.2, alpha=0.6),
    "absolute": lambda z: (z * 0.5).abs(),
    "adjoint": lambda z: torch.linalg.solve_triangular((z * torch.eye(3) + 1).mH, z * torch.ones(3, 2), upper=False).mT,
    "one part": lambda z: (z * torch.ones(3)).split(3)[0],
    "one of one": lambda z: (z * torch.ones(1, 3)).unbind()[0] + (z * torch.ones(3, 2)).split([3])[0].sum(),
    "parts": lambda z: torch.cat((z * torch.arange(5)).split(2)[::-1]) + (z * torch.ones(2, 5)).unbind()[1],
    "conjugate": lambda z: torch.cat([(z * torch.ones(2)).conj(), z[None]]),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.every(2)
def test_complex_numbers(grad):
    """Regression: the product of a complex number and a float was complex128; what read it as complex64 read other
    numbers. Kernels that got a conjugate returned other strides than were planned. A split into one part ended the
    process."""

    def step(z):
        found = {name: COMPLEX[name](z) for name in COMPLEX}
        if grad:
            sum(value.abs().sum() for value in found.values() if value.requires_grad).backward()
        return {name: value.detach() for name, value in found.items()}

    compiled = sidefx_train.compile(step, on_failure="raise", verify=0)
    wanted, found = (run(torch.tensor(1 + 2j, requires_grad=grad)) for run in (step, compiled))
    for name in COMPLEX:
        torch.testing.assert_close(found[name], wanted[name], msg=lambda text, name=name: f"{name}: {text}")
    if grad:
        inputs = [torch.tensor(0.5 - 1j, requires_grad=True) for _ in range(2)]
        step(inputs[0]), compiled(inputs[1])
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


POOLINGS = [
    (dims, kernel, stride, padding, counts)
    for dims in (1, 2, 3)
    for kernel, stride, padding in ((2, 2, 0), (2, 3, 0), (3, 2, 0), (3, 2, 1), (3, 3, 1))
    for counts in ((True, False) if dims < 3 else (True,))
]
SIZES = ((7, 9, 8), (8, 5, 6))


def _pooled(xs: list[torch.Tensor], dims: int) -> list[torch.Tensor]:
    """Returns averages over windows, also of squares, and their gradients: a window may extend past the end."""
    results = []
    for x in xs:
        for dim, kernel, stride, padding, counts in POOLINGS:
            if dim != dims:
                continue
            x = x.detach().requires_grad_()
            pool = getattr(nn.functional, f"avg_pool{dims}d")
            y = pool(x, kernel, stride, padding, ceil_mode=True, count_include_pad=counts)
            norm = getattr(nn.functional, f"lp_pool{dims}d")(x, 2, kernel, stride, ceil_mode=True)
            weights = torch.arange(y.numel()).reshape(y.shape) / 10
            results += [y.detach(), *torch.autograd.grad((y * weights).sum() + norm.square().sum(), x)]
    return results


@pytest.mark.parametrize("dims", [pytest.param(dims, marks=pytest.mark.slow) for dims in (1, 2, 3)])
def test_windows_past_the_end(dims):
    xs = [torch.randn(2, 3, *size[:dims]) for size in SIZES]
    for have, wanted in zip(sidefx_train.compile(_pooled)(xs, dims), _pooled(xs, dims), strict=True):
        torch.testing.assert_close(have, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_windows_past_the_end_of_sizes_that_change():
    """Inductor decides on sizes while it lowers: code compiled for one such decision is not used for another."""

    def pooled(x):
        x = x.detach().requires_grad_()
        y = nn.functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True)
        return y.detach(), torch.autograd.grad((y * y).sum(), x)[0]

    step = sidefx_train.compile(pooled)
    for size in (8, 11, 12, 14):
        x = torch.randn(2, 3, size, size + 1)
        torch.testing.assert_close(step(x), pooled(x))
    assert not step.report().fallbacks, str(step.report())


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((4, 4), {"scale_factor": 1.7}),
        ((4, 5), {"scale_factor": (0.6, 2.3)}),
        ((14, 7), {"size": (46, 14)}),
        ((3, 3), {"size": (123, 6)}),
        ((5, 6), {"size": (3, 4)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradient_of_nearest_neighbors(size, options, memory_format):
    def step(x):
        made = F.interpolate(x, mode="nearest", **options)
        weights = torch.arange(made.numel(), dtype=x.dtype).view(made.shape)
        (gradient,) = torch.autograd.grad((made * weights).sum(), x)
        return gradient

    x = torch.randn(2, 3, *size).to(memory_format=memory_format).requires_grad_()
    found, wanted = sidefx_train.compile(step, on_failure="raise", verify=0)(x), step(x)
    torch.testing.assert_close(found, wanted)
    assert found.stride() == wanted.stride()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradient_of_nearest_neighbors_between_convolutions(layout, monkeypatch):
    """It has the memory format of the gradient that it is given; that of a volume is contiguous."""
    monkeypatch.setenv("SIDEFX_CHECK_GRAPHS", "1")

    def step(x, weight):
        made = F.interpolate(F.conv2d(x, weight), scale_factor=1.7, recompute_scale_factor=False)
        return torch.autograd.grad(F.conv2d(made, weight).square().mean(), x)[0]

    x, weight = torch.randn(2, 4, 11, 8).to(memory_format=layout).requires_grad_(), torch.randn(4, 4, 3, 3)
    found, wanted = sidefx_train.compile(step, on_failure="raise")(x, weight), step(x, weight)
    torch.testing.assert_close(found, wanted)
    assert found.stride() == wanted.stride()


EXPANDED = {
    "index_put": lambda x, rows: torch.index_put(x, (rows,), x.sum() * 0),
    "added by index": lambda x, rows: torch.index_put(x, (rows,), x.sum(), accumulate=True),
    "index_fill": lambda x, rows: x.index_fill(0, rows, 2.0),
    "index_copy": lambda x, rows: x.index_copy(0, rows, x[:1] * 2),
    "index_add": lambda x, rows: x.index_add(0, rows, x[:1]),
    "put": lambda x, rows: torch.put(x, rows, x[0, :1] * 2),
    "diagonal": lambda x, rows: torch.diagonal_scatter(x, x[0] * 2),
    "row": lambda x, rows: torch.select_scatter(x, x[0] * 2, 0, 1),
}


@pytest.mark.parametrize("name", EXPANDED)
@pytest.mark.every(4)
def test_replaced_elements_of_expanded_tensors(name):
    """Inductor replaced all elements that are one in memory."""

    def step(x, rows):
        made = EXPANDED[name](x, rows)
        of_row = EXPANDED[name]((x[:1] * 2).expand(3, 3), rows)
        of_number = EXPANDED[name](torch.ones(()).expand(3, 3), rows)
        return of_row.detach(), of_number, torch.autograd.grad(made.sum(), x)[0]

    x, rows = torch.randn(3, 3, requires_grad=True), torch.tensor([0])
    compiled = sidefx_train.compile(step, verify=0, on_failure="raise")
    for wanted, found in zip(step(x, rows), compiled(x, rows), strict=True):
        torch.testing.assert_close(found, wanted)
