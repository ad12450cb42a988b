"""Upstream torch bugs that this library works around are still present.

Each program is the smallest known one that gives wrong results, and runs with its workaround disabled. If one gives
right results, torch has fixed the bug, and the workaround can be removed. The check of schedules, not the contents of
memory, detects a kernel that reads memory at the wrong time.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops import scan
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import sidefx_train
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend import inductor
from sidefx_train.compile.backend.graph_cache import cache_tag
from sidefx_train.compile.gpu.simulation import SimulatedStep
from sidefx_train.config import CompileConfig
from sidefx_train.switches import CORRECTNESS, without
from tests.support.disk_cache import new_cache

WIDTH = 24
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


@dataclass(frozen=True)
class Bug:
    """A program with wrong results in upstream torch.

    Attributes:
        switch: name of its workaround.
        program: a function of the inputs; its results are compared.
        sizes: shapes of the inputs drawn for it.
        others: further inputs.
        since: the oldest torch version known to have the bug.
        until: the first version in which upstream is right; the workaround is for older ones.
        trains: gradients of the first input are compared as well.
        on_gpu: it is a bug of kernels of a GPU, which is simulated.
    """

    switch: str
    program: Callable[..., Any]
    sizes: tuple[tuple[int, ...], ...]
    others: tuple[torch.Tensor, ...] = ()
    since: tuple[int, int] = (2, 13)
    until: tuple[int, int] = (9, 0)
    trains: bool = False
    on_gpu: bool = False


ROWS = torch.tensor([1, 2, 5])


def mask_read_before_it_is_drawn(x):
    mask = torch.empty(8, 16, WIDTH).bernoulli_(0.9) / 0.9
    return mask, (x - x.mean(-1, keepdim=True)) * mask


def unused_draw_is_dropped(x):
    F.dropout(x, 0.5)
    return x + torch.rand(3)


def buffer_overwritten_while_it_is_read(bank, h, rows):
    bank[rows] = h
    bank.copy_(bank.roll(1, 0))
    return bank


def view_of_the_written_operand_is_read(x, rows):
    x = x * 2
    return x.index_put((rows,), x[:3], accumulate=True)


def view_of_a_removed_copy_is_written(x, rows):
    y = x.sin()
    z = y.clone().squeeze()
    return z.index_put((rows,), z.new_ones(())), y * 3


def operand_of_a_concatenation_is_written(x, y, rows):
    x = x * 2
    return torch.cat([x, y], -1), x.index_put((rows,), torch.tensor(1.0))


def memory_format_of_a_convolution(x, first, second):
    first = first.detach().requires_grad_()
    loss = F.conv3d(F.conv3d(F.elu(x), first), second).square().mean()
    return torch.autograd.grad(loss, (x, first))


def memory_format_of_a_padding(x, weight):
    loss = F.pad(F.conv3d(F.elu(x), weight), [1] * 6, mode="replicate").square().mean()
    return torch.autograd.grad(loss, (x,))


def saved_with_the_strides_of_a_concatenation(x):
    summed = torch.cumsum(x, -1) / 8
    gated = F.glu(torch.cat([summed, x], -1), -1)
    return torch.softmax(x @ summed.mT, -1) @ summed, gated


def cast_that_does_not_round(x):
    return x + (x.half().float() - x)


def padding_of_a_sum(x):
    x = x * 2 + 1
    return x, F.pad(x[:, 2:-2], (2, 2))


def multiple_of_a_product(x, a, b):
    return torch.add(x, a @ b, alpha=2)


def product_with_ones(x):
    return (x * torch.ones(4, 6)).t()


def product_with_one(x):
    return x * 1, x[1:] + 0


def dtype_of_a_running_sum(x):
    return torch.ones(4).cumsum(0, dtype=torch.float64) + x


def power_of_an_integer(exponents):
    return 2**exponents


def rows_share_a_buffer(x):
    h = x.transpose(1, 2).detach().requires_grad_()
    y = F.gelu(F.group_norm(h * h.amax((0, 2), keepdim=True), 1))
    return torch.autograd.grad(F.smooth_l1_loss(y, torch.zeros_like(y)), h)


def copy_of_a_written_part(x):
    x[0].add_(1)
    return x[0].clone()


def copy_of_written_rows(x):
    x[:2].add_(1)
    return x[:2].clone()


def inputs_that_are_exchanged(x, y, z):
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)
    z.copy_(x)
    return x, y, z


def window_past_the_padding(x):
    return torch.autograd.grad(F.avg_pool2d(x, 3, 2, 1, ceil_mode=True).sum(), x)


def pixels_by_a_scale_factor(x):
    made = F.interpolate(x, scale_factor=1.7, recompute_scale_factor=False)
    return torch.autograd.grad((made * torch.arange(6)).sum(), x)


def loop_carries_an_expanded_tensor(x):
    carried = scan(lambda c, row: (c * row, c + row), torch.ones(3), x)
    return torch.autograd.grad(carried[0].sum() + carried[1].sum(), x)


def rows_of_an_expanded_gradient(x):
    return x.index_fill(0, torch.tensor([0]), 2.0).sum()


def product_with_the_number_zero(x):
    return (x.log() * 0).sum().isnan() + x


def negative_zero_and_zero(x):
    zero = -(x * 0).abs()
    return torch.copysign(torch.ones_like(x), zero + torch.zeros_like(x)), torch.copysign(x, zero - torch.zeros(16))


def exponential_of_a_small_number(x):
    return torch.expm1(x * 1e-9).abs().log(), torch.atanh(x * 1e-9).abs().log()


def indices_for_a_store_and_a_load(x, columns):
    x, source = x.detach().requires_grad_(), (x.detach() * 2).requires_grad_()
    return torch.autograd.grad(((x.scatter(0, columns, source) + x) * x.detach()).sum(), (x, source))


def rows_in_random_order(x):
    return x[torch.randperm(4)] * 2, x[torch.randperm(len(x)).detach()[:4]]


def precision_of_a_complex_number(x):
    return torch.view_as_real(torch.view_as_complex(x) * 0.5) + 1


BUGS = (
    Bug("kernel_order", mask_read_before_it_is_drawn, ((8, 16, WIDTH),), since=(2, 11), until=(2, 14)),
    Bug("kernel_order", unused_draw_is_dropped, ((3,),)),
    Bug(
        "mutations_by_index",
        buffer_overwritten_while_it_is_read,
        ((8, 6), (3, 6)),
        (ROWS,),
        since=(2, 11),
        until=(2, 15),
    ),
    Bug(
        "no_write_while_read",
        view_of_the_written_operand_is_read,
        ((8, 6),),
        (ROWS,),
        since=(2, 11),
        until=(2, 15),
    ),
    Bug("no_write_while_read", operand_of_a_concatenation_is_written, ((8, 6), (8, 6)), (ROWS,), until=(2, 15)),
    Bug("no_write_while_read", view_of_a_removed_copy_is_written, ((8, 6),), (ROWS,)),
    Bug(
        "extern_strides",
        memory_format_of_a_convolution,
        ((5, 16, 8, 5, 7), (1, 16, 2, 2, 2), (18, 1, 3, 3, 3)),
        trains=True,
    ),
    Bug("extern_strides", memory_format_of_a_padding, ((2, 4, 6, 6, 6), (4, 4, 3, 3, 3)), trains=True),
    Bug("result_strides", saved_with_the_strides_of_a_concatenation, ((8, 16, WIDTH),), trains=True),
    Bug("rounding_casts", cast_that_does_not_round, ((64,),)),
    Bug("results_own_storage", product_with_ones, ((4, 6),)),
    Bug("results_own_storage", product_with_one, ((4, 6),), since=(2, 14)),
    Bug("results_own_storage", copy_of_a_written_part, ((2, 5),), since=(2, 11)),
    Bug("results_own_storage", copy_of_written_rows, ((4, 5),), since=(2, 11)),
    Bug("copies_for_writes", inputs_that_are_exchanged, ((4,), (4,), (4,)), until=(2, 15)),
    Bug("rows_of_their_own", rows_share_a_buffer, ((1, 12, 3),), since=(2, 11), until=(2, 14)),
    Bug("zero_products", product_with_the_number_zero, ((8, 16),), until=(2, 14)),
    Bug("zero_sums", negative_zero_and_zero, ((8, 16),)),
    Bug("small_arguments", exponential_of_a_small_number, ((8, 16),)),
    Bug("index_arrays", indices_for_a_store_and_a_load, ((5, 5),), (torch.arange(25).view(5, 5) // 5,)),
    Bug("masked_reads", padding_of_a_sum, ((4, 8),), until=(2, 14), on_gpu=True),
    Bug("inductor_workarounds", multiple_of_a_product, ((8, 5), (8, 6), (6, 5)), until=(2, 15)),
    Bug("inductor_workarounds", dtype_of_a_running_sum, ((4,),), until=(2, 14)),
    Bug("inductor_workarounds", power_of_an_integer, (), (torch.arange(5),), until=(2, 15)),
    Bug("inductor_workarounds", window_past_the_padding, ((1, 1, 8, 8),), trains=True),
    Bug("inductor_workarounds", pixels_by_a_scale_factor, ((1, 1, 4, 4),), trains=True),
    Bug("inductor_workarounds", precision_of_a_complex_number, ((2,),)),
    Bug("inductor_workarounds", rows_in_random_order, ((4, 3),)),
    Bug("inductor_workarounds", loop_carries_an_expanded_tensor, ((4, 3),), trains=True),
    Bug("inductor_workarounds", rows_of_an_expanded_gradient, ((4, 3),), trains=True),
)


def results(function: Callable[..., Any], bug: Bug) -> list[torch.Tensor]:
    """Returns results, the gradient of the first input, which results share storage with an input, and the next random
    number."""
    torch.manual_seed(0)
    inputs = [*map(torch.randn, bug.sizes), *bug.others]
    if bug.trains:
        inputs[0].requires_grad_()
    made = function(*inputs)
    made = list(made) if isinstance(made, (list, tuple)) else [made]
    if bug.trains and made[0].requires_grad:
        sum(each.square().mean() for each in made).backward()
        made.append(inputs[0].grad)
    places = {each.untyped_storage().data_ptr() for each in inputs}
    shared = torch.tensor([1.0 + (each.untyped_storage().data_ptr() in places) for each in made])
    return [*(each.detach() for each in made), shared, torch.rand(1)]


def is_wrong(bug: Bug) -> bool:
    """Returns whether Inductor's results differ from eager's, or its schedule or C++ was refused, or a pass failed."""
    chosen = {"verify": 0, "autotune": "off", "rng": "eager"}
    if bug.on_gpu:
        pytest.importorskip("triton")
        step = SimulatedStep(bug.program, CompileConfig(**chosen))
    else:
        step = sidefx_train.compile(bug.program, **chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = results(step, bug)
    refused = [fallback.reason for fallback in sidefx_train.explain(step).fallbacks]
    known = ("WrongSchedule", "C++ compile error", "Not all inputs to pattern found")
    assert all(any(each in reason for each in known) for reason in refused), (
        f"it ran eagerly for another reason: {refused}"
    )
    if refused:
        return True
    pairs = zip(found, results(bug.program, bug), strict=True)
    return not all(a.dtype == b.dtype and _distance(a, b) <= 1e-4 for a, b in pairs)


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the norm of the difference, relative to the expected tensor."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.program.__name__)
@pytest.mark.every(2)
def test_inductor_is_still_wrong(bug):
    if bug.since > VERSION:
        pytest.skip(f"seen in torch {'.'.join(map(str, bug.since))} and later")
    with without(bug.switch):
        if bug.until <= VERSION:
            assert not is_wrong(bug), f"{bug.program.__name__} is wrong in torch {torch.__version__} again"
            return
        assert is_wrong(bug), f"upstream has mended {bug.program.__name__}: remove the workaround ({bug.switch})"


@pytest.mark.slow  # other tests compare more programs of each kind
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.program.__name__)
def test_the_workaround_mends_it(bug):
    assert not is_wrong(bug), f"{bug.program.__name__} is wrong in spite of the workaround ({bug.switch})"


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.program.__name__)
def test_the_workaround_mends_it_on_a_gpu(bug):
    assert not is_wrong(replace(bug, on_gpu=True)), f"{bug.program.__name__} is wrong in kernels of a GPU"


def test_every_workaround_has_a_program():
    listed = {bug.switch for bug in BUGS}
    assert listed == {*CORRECTNESS, "inductor_workarounds"}, "each switch of CORRECTNESS needs a program here"


def test_the_tag_of_inductors_cache_names_the_switches():
    with without("rounding_casts"):
        other = cache_tag()
    assert cache_tag() != other


@pytest.mark.slow  # the tag, with the compiler
def test_a_graph_of_other_switches_is_not_found_in_inductors_cache(tmp_path, monkeypatch):
    """Regression: graphs with a constant are kept only in Inductor's cache, whose key did not include the switches."""
    new_cache(tmp_path, monkeypatch)
    bug = next(bug for bug in BUGS if bug.program is operand_of_a_concatenation_is_written)
    with without(bug.switch):
        is_wrong(bug)
    assert not is_wrong(bug), "the graph compiled without the workaround was taken"


def test_inductor_still_raises_the_recursion_limit(monkeypatch):
    monkeypatch.setattr(inductor, "find", lambda *_: None)  # a cached graph would not be lowered
    monkeypatch.setattr(compat.inductor.compile, "recursion_limit_kept", nullcontext)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1500)
    try:
        sidefx_train.compile(lambda x: x * 2, on_failure="raise")(torch.ones(3))
        left = sys.getrecursionlimit()
    finally:
        sys.setrecursionlimit(before)
    assert left != 1500, "upstream has mended the recursion limit: remove the workaround (recursion_limit_kept)"


FAKES: dict[str, tuple[tuple[Any, ...], Callable[[], Any]]] = {
    "fake kernel of grouped products": (
        (torch.ops.aten._grouped_mm.default,),
        lambda: torch.ops.aten._grouped_mm(torch.empty(2, 8, 16), torch.empty(2, 16, 8)),
    ),
    "fake kernel of connectionist temporal classification": (
        (torch.ops.aten._ctc_loss.default,),
        lambda: torch.ops.aten._ctc_loss(torch.empty(5, 2, 4), torch.zeros(2, 3, dtype=torch.long), [5, 5], [3, 2]),
    ),
}


@pytest.mark.parametrize("name", FAKES)
def test_torch_still_lacks_a_fake_kernel(name, monkeypatch):
    if name == "fake kernel of grouped products" and VERSION >= (2, 15):
        pytest.skip("torch has it from 2.15 on")
    operators, call = FAKES[name]
    for operator in operators:
        monkeypatch.delitem(fake_impls.op_implementations_dict, operator, raising=False)
    FakeTensorMode.cache_clear()
    try:
        with compat.quiet_fakes(), FakeTensorMode():
            call()
    except Exception:
        return
    finally:
        FakeTensorMode.cache_clear()
    raise AssertionError(f"upstream has mended the {name}: remove the workaround (torch_compat/fakes/kernels.py)")


def test_torch_still_fails_to_test_truth_of_symbolic_sizes(monkeypatch):
    if VERSION >= (2, 15):
        pytest.skip("torch accepts them from 2.15 on")
    for operator in compat.TRUTH_TESTS:
        monkeypatch.delitem(fake_impls.op_implementations_dict, operator, raising=False)
    FakeTensorMode.cache_clear()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.ones(8, 3, dtype=torch.bool))
    try:
        with compat.quiet_fakes(), mode:
            torch._is_all_true(fake)
    except RuntimeError:
        return
    finally:
        FakeTensorMode.cache_clear()
    raise AssertionError("upstream has mended it: remove the workaround (torch_compat/fakes/kernels.py)")


def test_fakes_of_complex_views_still_want_pairs():
    real = torch.view_as_complex(torch.randn(4).view(2, 2))
    with compat.quiet_fakes():
        try:
            FakeTensorMode().from_tensor(real, static_shapes=True)
        except RuntimeError:
            return
    raise AssertionError("upstream has mended fakes of complex views: remove the workaround (_complex_view)")
