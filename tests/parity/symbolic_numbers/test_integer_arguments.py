"""Integers that change from call to call as arguments of operators: one graph for all values, and eager's results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sidefx_train

TARGET = torch.tensor([1, 0, 3, 2, 1, 0])
MASK = TARGET[:, None] < 2

AS_FLOATS = {
    "huber": lambda x, k: F.huber_loss(x, x.detach() * 9, delta=k),
    "smooth l1": lambda x, k: F.smooth_l1_loss(x, x.detach() * 9, beta=k),
    "pow": lambda x, k: x.pow(k),
    "pow operator": lambda x, k: (x.abs() + 0.1) ** k,
    "power of a number": lambda x, k: k**x,
    "float_power": lambda x, k: torch.float_power(x, k),
    "norm": lambda x, k: x.norm(k),
    "norm of rows": lambda x, k: torch.linalg.vector_norm(x, k, dim=1),
    "normalize": lambda x, k: F.normalize(x, k),
    "distance of two": lambda x, k: torch.dist(x, x.detach() * 2, k),
    "distances": lambda x, k: torch.cdist(x, x * 2, k),
    "renorm": lambda x, k: torch.renorm(x, k, 0, 1.0),
    "lerp": lambda x, k: x.lerp(x * 2, k),
    "celu": lambda x, k: F.celu(x, k),
    "margin": lambda x, k: F.triplet_margin_loss(x, x * 2, x - 1, margin=k),
    "margin of classes": lambda x, k: F.multi_margin_loss(x, TARGET, margin=k),
    "normal": lambda x, k: x + torch.empty(6, 6).normal_(0, k),
    "normal by name": lambda x, k: x + torch.empty(6, 6).normal_(mean=k, std=1),
    "normal numbers": lambda x, k: x * torch.normal(0, k, (6, 6)),
    "uniform": lambda x, k: x + torch.empty(6, 6).uniform_(-k, k),
    "exponential": lambda x, k: x + torch.empty(6, 6).exponential_(k),
    "initialized": lambda x, k: x * torch.nn.init.normal_(torch.empty(6, 6), 0, k),
    "eps": lambda x, k: F.layer_norm(x, (6,), eps=k),
    "eps of a batch norm": lambda x, k: F.batch_norm(x, None, None, training=True, eps=k),
    "scale of attention": lambda x, k: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=k),
    "padded": lambda x, k: F.pad(x, (1, 1), value=k),
    "padded by the operator": lambda x, k: torch.constant_pad_nd(x, (1, 1), k),
    "masked rows": lambda x, k: torch.ops.aten._unsafe_masked_index(x, MASK, [TARGET], k),
    "not a number": lambda x, k: torch.nan_to_num(x, k),
    "trapezoid": lambda x, k: torch.trapezoid(x, dx=k),
    "pooled norm": lambda x, k: F.lp_pool1d(x.abs()[None], k, 2),
    "place among numbers": lambda x, k: x * torch.searchsorted(torch.arange(8.0), k),
    "bucket": lambda x, k: x * torch.bucketize(k, torch.arange(8.0)),
    "integers": lambda x, k: x * torch.arange(6).pow(k),
    "interpolated": lambda x, k: F.interpolate(x[None], scale_factor=k),
    "interpolated images": lambda x, k: F.interpolate(x[None, None], scale_factor=(k, 2), mode="bilinear"),
}
"""Operators that want a float, or that C++ code gives one to."""


class State:
    value = 0
    padding = 0


def history(step, compiled, values):
    """Returns (result, gradient) at each value."""
    found = []
    for number, value in enumerate(values):
        State.value = value
        torch.manual_seed(number)
        x = torch.randn(6, 6, requires_grad=True)
        found.append((compiled(x), x.grad))
    return found


def check(call, backend, values, captures):
    def step(x):
        y = call(x, State.value)
        y.square().sum().backward()
        return y.detach()

    compiled = sidefx_train.compile(step, backend=backend, rng="eager")
    want, have = history(step, step, values), history(step, compiled, values)
    report = compiled.report()
    assert len(report.captures) <= captures and not report.breaks and not report.fallbacks, str(report)
    for wanted, had in zip(want, have, strict=True):
        for a, b in zip(wanted, had, strict=True):
            assert a.dtype == b.dtype
            if backend == "eager":
                assert torch.equal(a, b) and a.stride() == b.stride()
            else:
                torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", AS_FLOATS)
@pytest.mark.every(4)
def test_integer_where_an_operator_wants_a_float(name):
    check(AS_FLOATS[name], "eager", (3, 4, 5, 7, 4), 2)


FUSED = (
    *("huber", "pow", "norm", "distance of two", "lerp", "celu", "margin of classes", "normal", "uniform", "eps"),
    *("padded", "padded by the operator", "masked rows", "bucket", "interpolated", "power of a number"),
)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.every(4)
def test_compiled_code_reads_the_float_of_an_integer(name, backend):
    check(AS_FLOATS[name], backend, (3, 4, 5, 7, 4), 3)  # some tell odd integers from even ones


def test_an_integer_at_a_limit_has_a_capture_of_its_own():
    check(lambda x, k: (x.abs() + 0.1) ** k, "eager", (3, 2, 4, 1, 0, 5, -1, -2, -3, 2, 1), 8)


def test_integers_stay_integers_among_integers():
    def step(x):
        return x**State.value, torch.pow(State.value, x), torch.dist(x.double(), x.double() * 2, State.value)

    compiled = sidefx_train.compile(step, backend="eager")
    for State.value in (3, 4, 5, 6):
        x = torch.arange(5)
        assert repr(compiled(x)) == repr(step(x))
    assert len(compiled.report().captures) == 2


def test_the_error_of_an_invalid_integer():
    def step(x):
        return F.huber_loss(x, x * 2, delta=State.value), F.dropout(x, State.value - 4)

    compiled = sidefx_train.compile(step, backend="eager")
    for State.value in (4, 5, 4, 5, 6, 7):
        shown = []
        for run in (step, compiled):
            torch.manual_seed(0)
            try:
                shown.append(repr(run(torch.ones(3))))
            except ValueError as error:
                shown.append(repr(error))
        assert shown[0] == shown[1]


def blanked(x, k):
    y = x * 1
    y.diagonal(k).zero_()
    return y


OFFSETS = {
    "diagonal": lambda x, k: x.diagonal(k),
    "diagonal of columns": lambda x, k: torch.linalg.diagonal(x.view(2, 3, 6), offset=k, dim1=-1, dim2=0),
    "diagonal that is written": blanked,
    "copied diagonal": lambda x, k: torch.diagonal_copy(x, offset=k),
    "scattered diagonal": lambda x, k: torch.diagonal_scatter(x, torch.zeros(max(6 - abs(k), 0)), k),
    "diag of a matrix": lambda x, k: torch.diag(x, k),
    "diag of a line": lambda x, k: x[0].diag(diagonal=k),
    "diag_embed": lambda x, k: torch.diag_embed(x, k),
    "diag_embed between": lambda x, k: torch.diag_embed(x, k, -1, 0),
    "diagflat": lambda x, k: torch.diagflat(x[:2], k),
    "tril": lambda x, k: x.tril(k),
    "triu": lambda x, k: x.triu(k),
    "indices of a triangle": lambda x, k: x * torch.tril_indices(5, 4, k).sum(),
    "indices of an upper triangle": lambda x, k: x * torch.triu_indices(5, 4, offset=k).sum(),
    "rolled": lambda x, k: x.roll(k, 1),
    "rolled windows": lambda x, k: torch.roll(x[None], (k, -k), (1, 2)),
    "select": lambda x, k: x.select(0, k % 6),
}


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.every(3)
def test_offsets(name):
    check(OFFSETS[name], "eager", (2, 3, 4, 2, -3, -2, -4, -3, 0, 7, 1), 8)


COUNTS = {
    "classes": lambda x, k: x * F.one_hot(TARGET, k + 2).sum(),
    "triangle": lambda x, k: x * torch.tril_indices(k, k).sum(),
    "spaced": lambda x, k: torch.linspace(0, 1, k) * x.sum(),
    "spaced by a factor": lambda x, k: torch.logspace(0, 1, k, base=2.0) * x.sum(),
    "largest": lambda x, k: x.topk(k)[0],
    "smallest but some": lambda x, k: x.kthvalue(k)[0],
    "narrow": lambda x, k: x.narrow(1, 0, k),
    "parts": lambda x, k: x.view(4, 9).split([k, 9 - k], 1)[0],
    "padded": lambda x, k: F.pad(x, (k, 1)),
    "repeated": lambda x, k: x.repeat_interleave(k, 0),
    "from an offset": lambda x, k: torch.as_strided(x * 1, (2, 3), (6, 1), k),
    "ignored class": lambda x, k: F.cross_entropy(x, torch.tensor([1, 0, 3, 2, 5, 4]), ignore_index=k),
    "ignored class of weights": lambda x, k: F.nll_loss(x, TARGET * 1, x[0].detach().abs(), ignore_index=k),
    "bins": lambda x, k: x * torch.histc(x.detach(), k, -3, 3).sum(),
    "rows in windows": lambda x, k: x.unfold(0, k, 1),
    "columns in windows": lambda x, k: x * x.detach().t().unfold(-1, k, 2).sum(),
    "normalized channels": lambda x, k: F.local_response_norm(x[None], k),
    "rounded": lambda x, k: x * torch.round(x, decimals=k),
    "polygamma": lambda x, k: torch.polygamma(k, x.abs() + 1),
    "random integers": lambda x, k: x * torch.empty(6).random_(k),
    "random integers between": lambda x, k: x * torch.empty(6, dtype=torch.int64).random_(-k, 9),
    "random integers like others": lambda x, k: x * torch.randint_like(x, 2, k + 1),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.every(3)
def test_counts(name):
    check(COUNTS[name], "eager", (3, 4, 5, 4, 2), 4)  # a relation of the sizes may have a capture of its own


WINDOWS = {
    "means": lambda x, k: F.avg_pool2d(x[None], k, 1),
    "means of lines": lambda x, k: F.avg_pool1d(x, k, stride=2, ceil_mode=True),
    "means by a stride": lambda x, k: F.avg_pool2d(x[None], 3, k, 1, count_include_pad=False),
    "means that are divided": lambda x, k: F.avg_pool2d(x[None], (2, 3), divisor_override=k),
    "means of volumes": lambda x, k: F.avg_pool3d(x.view(1, 6, 2, 3), (k, 1, 2), 1, padding=(1, 0, 0)),
    "maxima": lambda x, k: F.max_pool2d(x[None, None], k, 1),
    "maxima of lines": lambda x, k: F.max_pool1d(x, k, padding=1, stride=2, ceil_mode=True),
    "maxima and indices": lambda x, k: torch.stack(
        [each.to(x.dtype) for each in F.max_pool2d(x[None], 2, dilation=k - 1, stride=1, return_indices=True)]
    ),
    "maxima of volumes": lambda x, k: F.max_pool3d(x.view(1, 1, 6, 2, 3), (k, 1, 2), stride=1),
    "module": lambda x, k: torch.nn.MaxPool2d(k, 1)(x[None]),
    "means to a size": lambda x, k: F.adaptive_avg_pool1d(x[None], k),
    "maxima to a size": lambda x, k: F.adaptive_max_pool1d(x[None], k),
    "maxima of images to a size": lambda x, k: F.adaptive_max_pool2d(x[None], (k, 2)),
    "columns": lambda x, k: F.unfold(x[None, None], k, padding=1, stride=2),
    "image": lambda x, k: F.fold(x.view(1, 36)[:, : k * k].view(1, 1, -1), (k, k), 1),
    "shuffled": lambda x, k: F.pixel_shuffle(x.repeat(k, k).view(1, k * k, 6, 6), k),
    "shuffled back": lambda x, k: F.pixel_unshuffle(x.repeat(k, k)[None], k),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.every(3)
def test_windows(name):
    check(WINDOWS[name], "eager", (3, 2, 4, 5, 3), 3)  # counts of 1 have a capture of their own


COMPILED = {name: {**OFFSETS, **COUNTS}[name] for name in (*list(OFFSETS)[:11], *list(OFFSETS)[12:14], *COUNTS)}
COMPILED |= WINDOWS


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.every(8)
def test_compiled_offsets_and_counts(name, backend):
    check(COMPILED[name], backend, (3, 4, 2, 3), 3)  # sizes of 0 and 1 have a capture of their own


FILTERS = torch.linspace(-1, 1, 24).view(3, 2, 2, 2)

CONVOLUTIONS = {
    "convolution by a stride": lambda x, k: F.conv1d(x.view(1, 1, 36), FILTERS.view(8, 1, 3), stride=k),
    "convolution of a padded image": lambda x, k: F.conv2d(x.view(1, 1, 6, 6), FILTERS[:, :1], padding=k),
    "convolution of other elements": lambda x, k: F.conv1d(x[None], FILTERS.view(2, 6, 2), dilation=k - 1),
    "convolution with another kernel": lambda x, k: F.conv1d(x[None], FILTERS.view(4, 6, 1).expand(-1, -1, k)),
    "transposed convolution": lambda x, k: F.conv_transpose1d(x[None], FILTERS.view(6, 2, 2), stride=k),
    "padded transposed convolution": lambda x, k: F.conv_transpose1d(
        x[None], FILTERS.view(6, 2, 2), stride=4, padding=k
    ),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.every(4)
def test_convolutions(name, backend):
    check(CONVOLUTIONS[name], backend, (3, 4, 2, 5, 3), 3)


def test_classes_out_of_range():
    def step(classes):
        return F.one_hot(classes, State.value)

    compiled = sidefx_train.compile(step, backend="eager")
    for State.value in (4, 5, 6, 3, 7):
        shown = []
        for run in (step, compiled):
            try:
                shown.append(repr(run(TARGET)))
            except RuntimeError as error:
                shown.append(str(error))
        assert shown[0] == shown[1]


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d], ids=["maxima", "means"])
def test_windows_that_do_not_fit(pool):
    def step(x):
        return pool(x, State.value, padding=State.padding)

    compiled = sidefx_train.compile(step, backend="eager")
    for State.value, State.padding in ((2, 0), (3, 0), (4, 1), (5, 2), (3, 2), (0, 0), (9, 1), (2, 1), (-1, 0), (4, 2)):
        shown = []
        for run in (step, compiled):
            try:
                shown.append(repr(run(torch.arange(36.0).view(1, 6, 6))))
            except RuntimeError as error:
                shown.append(str(error))
        assert shown[0] == shown[1], (State.value, State.padding)


TWICE = ("means", "means of volumes", "maxima", "maxima of lines", "maxima of images to a size", "columns", "image")


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.every(8)
def test_second_derivatives_of_windows(name, backend):
    def twice(x, k):
        y = WINDOWS[name](x.exp(), k)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return grad

    check(twice, backend, (3, 2, 4, 3), 3)


def test_an_operator_called_with_an_integer_for_a_list():
    """It is a capture for each value, and not eager."""
    check(lambda x, k: torch.ops.aten.max_pool2d_with_indices(x[None], 2, k)[0], "eager", (3, 2, 4, 3), 3)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_labels_from_outside_are_checked_with_the_ignored_one(backend):
    """The check of the labels before the run got a node of the graph for the ignored class."""
    ignored = [0]

    def step(x, labels):
        return x.grad_fn is None, F.cross_entropy(x * 2, labels, ignore_index=ignored[0])

    captured = sidefx_train.compile(step, backend=backend)
    labels = torch.tensor([0, 3, 2, 9])
    for ignored[0] in (9, -5, 9, -7, 9):
        x, given = torch.randn(4, 4, requires_grad=True), torch.where(labels == 9, ignored[0], labels)
        torch.testing.assert_close(captured(x, given)[1], step(x, given)[1])
    with pytest.raises(IndexError):
        captured(x, torch.tensor([0, 4, 2, 1]))
    report = captured.report()
    assert len(report.captures) == 2 and [each.code for each in report.fallbacks] == ["SFX202"], report


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_random_integers_have_no_gradient(backend):
    bound = [0]

    def step(x):
        y = x * 2
        y.random_(bound[0])
        (grad,) = torch.autograd.grad((y * x).sum(), x)
        return y.detach(), grad

    captured = sidefx_train.compile(step, backend=backend)
    for bound[0] in (3, 5, 9, 7):
        found = []
        for run in (step, captured):
            torch.manual_seed(0)
            found.append(run(torch.arange(4.0, requires_grad=True)))
        assert all(map(torch.equal, *found))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        sidefx_train.compile(lambda x: x.random_(bound[0]), backend=backend)(torch.ones(3, requires_grad=True))


def test_windows_of_parts_of_a_tensor():
    """The offset of an input in memory is not that of the capture."""
    size, held = [0], torch.arange(40.0)
    captured = sidefx_train.compile(lambda x: x.unfold(0, size[0], 1) * 2, backend="eager")
    for offset, size[0] in ((0, 2), (3, 3), (7, 4), (11, 5), (2, 3)):
        assert torch.equal(captured(held[offset : offset + 9]), held[offset : offset + 9].unfold(0, size[0], 1) * 2)


def test_windows_of_an_expanded_tensor():
    size = [0]

    def step(x):
        rows = x.expand(6, 3).detach().requires_grad_()
        return torch.autograd.grad(rows.unfold(0, size[0], 1).sum(), rows)[0]

    captured = sidefx_train.compile(step, backend="eager")
    for size[0] in (2, 3, 4, 3):
        x = torch.ones(1, 3)
        assert torch.equal(captured(x), step(x))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_windows_of_images_that_a_convolution_made(backend):
    """Its results may be laid out by channels."""
    kernel = [0]
    convolution = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)

    def step(x):
        y = F.avg_pool2d(convolution(x), kernel[0], 1)
        return torch.autograd.grad(y.transpose(1, 3).contiguous().sin().sum(), convolution.weight)[0]

    captured = sidefx_train.compile(step, backend=backend)
    for kernel[0] in (2, 3, 4, 3):
        x = torch.randn(2, 3, 10, 10).to(memory_format=torch.channels_last)
        torch.testing.assert_close(captured(x), step(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_gradient_of_filters_by_another_stride(backend):
    """Both strides give results of one size, so that no kernel notices a wrong one."""

    def step(x):
        return torch.nn.grad.conv2d_weight(x, (1, 1, 2, 2), torch.ones(1, 1, 2, 2), stride=State.value)

    compiled = sidefx_train.compile(step, backend=backend, keep_slower=True)
    for State.value in (3, 4, 3, 4):
        x = torch.arange(36.0).view(1, 1, 6, 6)
        torch.testing.assert_close(compiled(x), step(x))
    report = compiled.report()
    assert len(report.captures) == 2 and not report.breaks and not report.fallbacks, str(report)
