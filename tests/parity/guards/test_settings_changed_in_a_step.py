"""Settings of torch that a step changes: its kernels run with them, later steps find them, breaks keep them."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.nn.functional import conv2d

import sidefx_train
from tests.support.graph_breaks import outside

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")

WEIGHT = torch.randn(16, 3, 3, 3)


@contextmanager
def during(give, value, before):
    give(value)
    try:
        yield
    finally:
        give(before)


@pytest.fixture(autouse=True)
def settings():
    """Leaves the settings as they were."""
    from sidefx_train import torch_compat as compat

    before = compat.Settings.now()
    yield
    torch.set_flush_denormal(False)
    before.restore()


def convolves(x):
    with torch.backends.mkldnn.flags(enabled=False):
        return conv2d(x, WEIGHT)


def convolves_after_a_property(x):
    torch.backends.mkldnn.enabled = False
    y = conv2d(x, WEIGHT)
    torch.backends.mkldnn.enabled = True
    return y, conv2d(x, WEIGHT)


def differentiates(x):
    x = x.clone().requires_grad_()
    y = conv2d(x, WEIGHT).sum()
    with torch.backends.mkldnn.flags(enabled=False):
        y.backward()
    return x.grad


def fills(x):
    with during(torch.use_deterministic_algorithms, True, False):
        return torch.empty(5), x.new_empty(3), torch.empty(2, dtype=torch.int64), torch.empty(3).resize_(10)


def raises_without_a_deterministic_kernel(x):
    with during(torch.use_deterministic_algorithms, True, False):
        return x.flatten()[:9].clone().put_(torch.tensor([1, 2]), torch.ones(2))


def flushes(x):
    with during(torch.set_flush_denormal, True, False):
        return (x * 0 + 1e-39) * 0.5


def divides_integers(x):
    with during(torch.set_default_dtype, torch.float64, torch.float32):
        return torch.arange(3) / 2, torch.arange(3).sqrt(), torch.ones(2), x * 2


def counts_and_makes(x):
    """As under true half or double precision in Lightning."""
    with during(torch.set_default_dtype, torch.float64, torch.float32):
        right = x.flatten(1).argmax(1) == torch.arange(len(x))
        made = torch.full((2,), 1 / 3), torch.rand(3), torch.arange(0.0, 1, 0.3), torch.scalar_tensor(1 / 3)
        made += torch.where(right, 1 / 3, 2.0), right * 0.1, right.long() ** 0.5, torch.tensor(0.1), torch.randperm(4)
        return *made, right.float().mean(), right.sum() / len(x), right.sum() // 2, torch.sigmoid(right)


PROGRAMS = [
    convolves, convolves_after_a_property, differentiates, fills, raises_without_a_deterministic_kernel, flushes,
    divides_integers, counts_and_makes,
]  # fmt: skip


def outcome(function, x):
    try:
        made = function(x)
    except RuntimeError as error:
        return str(error)
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_kernels_run_with_what_the_step_has_set(program):
    step = sidefx_train.compile(program, backend="eager")
    for seed in range(3):
        x = torch.randn(4, 3, 33, 33, generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        expected = outcome(program, x)
        torch.manual_seed(seed)
        found = outcome(step, x)
        assert isinstance(expected, str) == isinstance(found, str)
        if isinstance(expected, str):
            assert found == expected
            continue
        for one, other in zip(expected, found, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("program", [divides_integers, counts_and_makes])
def test_another_default_dtype_stays_in_the_graph(program):
    step = sidefx_train.compile(program, backend="eager", fullgraph=True)
    step(torch.randn(4, 3, 2, 2))
    assert not step.report().breaks and not step.report().fallbacks


SETTINGS = {
    "benchmark": (lambda: torch.backends.cudnn.benchmark, lambda v: setattr(torch.backends.cudnn, "benchmark", v)),
    "onednn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "sparse": (torch._C._check_sparse_tensor_invariants, torch._C._set_check_sparse_tensor_invariants),
    "attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "warnings": (torch.is_warn_always_enabled, torch.set_warn_always),
    "threads of the backward": (torch._C._is_multithreading_enabled, torch.autograd.set_multithreading_enabled),
    "layout of gradients": (
        getattr(torch._C, "_is_grad_layout_enforcement_enabled", torch.is_warn_always_enabled),
        getattr(torch._C, "_set_grad_layout_enforcement_enabled", torch.set_warn_always),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_stays_as_a_step_leaves_it(name):
    """Also where the step was captured while it had that value."""
    ask, give = SETTINGS[name]
    first = ask()

    def program(x):
        y = x * 2
        give(not first)
        return y

    step = sidefx_train.compile(program, backend="eager")
    for before in (first, first, not first, not first, first, first):
        give(before)
        assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))
        assert ask() is not first
    assert step.report().replays == 6 and not step.report().breaks


def test_what_the_step_asks_after_it_has_changed_the_threads_of_the_backward():
    def program(x):
        asked = [torch._C._is_multithreading_enabled()]
        with torch.autograd.set_multithreading_enabled(False):
            asked.append(torch._C._is_multithreading_enabled())
            asked.append(outside(x.sum()))
            asked.append(torch._C._is_multithreading_enabled())
        torch.autograd.set_multithreading_enabled(not asked[0])
        return [*asked, torch._C._is_multithreading_enabled()]

    step = sidefx_train.compile(program, backend="eager")
    try:
        for before in (True, False, True, False):
            torch._C._set_multithreading_enabled(before)
            found, after = step(torch.ones(2)), torch._C._is_multithreading_enabled()
            torch._C._set_multithreading_enabled(before)
            assert found == program(torch.ones(2)) and after == torch._C._is_multithreading_enabled()
    finally:
        torch._C._set_multithreading_enabled(True)
    assert not step.report().fallbacks


def test_a_setter_without_a_getter_breaks():
    """Nobody can ask whether the step has changed it."""

    def program(x):
        y = x * 2
        torch._C._jit_set_utf8_decoding_ignore(False)
        torch._C._set_graph_exec_group(None)
        return y + 1

    step = sidefx_train.compile(program, backend="eager")
    for _ in range(2):
        assert torch.equal(step(torch.ones(2)), torch.full((2,), 3.0))
    assert {each.code for each in step.report().breaks} == {"SFX103"}


@pytest.mark.skipif(not hasattr(torch.autograd, "enforce_grad_layout_policy"), reason="before torch 2.13")
def test_gradients_have_the_layout_of_the_setting():
    weight = torch.zeros(3, 4, requires_grad=True)

    def program(x):
        (x.t() * weight).sum().backward()
        grad, weight.grad = weight.grad, None
        return grad.stride()

    step, x = sidefx_train.compile(program, backend="eager"), torch.ones(4, 3)
    for enforced in (True, False, True, False):
        with torch.autograd.enforce_grad_layout_policy(enforced):
            assert step(x) == program(x)
    assert step.report().replays == 4


@pytest.mark.skipif(not hasattr(torch._C, "_set_fp32_precision_setter"), reason="before torch 2.9")
def test_a_precision_stays_as_a_step_leaves_it():
    def ask():
        return torch._C._get_fp32_precision_getter("mkldnn", "conv")

    def program(x):
        torch._C._set_fp32_precision_setter("mkldnn", "conv", "tf32")
        return x * 2

    step = sidefx_train.compile(program, backend="eager")
    for _ in range(3):
        torch._C._set_fp32_precision_setter("mkldnn", "conv", "none")
        step(torch.ones(2))
        assert ask() == "tf32"
    torch._C._set_fp32_precision_setter("mkldnn", "conv", "none")


CONTEXTS = {
    "device": lambda: torch.device("cpu"),
    "nested devices": lambda: torch.device("meta"),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
    "onednn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "deterministic": lambda: during(torch.use_deterministic_algorithms, True, False),
    "dtype": lambda: during(torch.set_default_dtype, torch.float64, torch.float32),
    "threads": lambda: during(torch.set_num_threads, 2, torch.get_num_threads()),
    "threads of the backward": lambda: torch.autograd.set_multithreading_enabled(False),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_break_inside_a_setting_is_captured_in_parts(name):
    def program(x):
        with CONTEXTS[name](), torch.device("cpu") if name == "nested devices" else nullcontext():
            y = x * 2
            value = outside(y.sum())
            z = y * value + torch.ones(3)
        return z, torch.ones(2), torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()

    step = sidefx_train.compile(program, backend="eager")
    for seed in range(4):
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        found, expected = step(x), program(x)
        assert found[2:] == expected[2:]
        assert all(torch.equal(one, other) for one, other in zip(found[:2], expected[:2], strict=True))
        assert found[0].dtype == expected[0].dtype
    report = step.report()
    assert report.replays == 4 and not report.fallbacks and report.breaks


def test_a_capture_that_fails_leaves_no_setting_behind():
    def program(x):
        with during(torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision()):
            return sidefx_train.compile(lambda x: float(x.sum()))(x)

    step = sidefx_train.compile(program, backend="eager")
    step(torch.ones(3))
    assert torch.get_float32_matmul_precision() == "highest"


def test_elements_computed_after_determinism_was_switched_off():
    def program(x):
        torch.use_deterministic_algorithms(False)
        return x * 2 + 1

    step = sidefx_train.compile(program, backend="eager", fullgraph=True)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for _ in range(2):
            torch.use_deterministic_algorithms(True)
            assert torch.equal(step(torch.ones(3)), torch.full((3,), 3.0))
            assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)
    assert len(step.report().captures) == 1
