"""Attention by the native module matches float64, and replaces the fused kernel in a step."""

from __future__ import annotations

import dataclasses
import math
import platform
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.autotune import attention, native_attention
from sidefx_train.compile.backend.cpp_codegen.wrapper_prelude import header_free_wrapper
from sidefx_train.compile.native import build
from tests.support.disk_cache import new_cache

NOTE = "attentions by the native module"


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    new_cache(tmp_path, monkeypatch)  # cached graphs that were lowered with other timings are not used
    monkeypatch.setattr(attention, "timings", lambda tasks: dict.fromkeys(tasks, {"fused": 1.0, "native": 0.1}))
    with compat.inductor_options({"cpp_cache_precompile_headers": False}):
        yield


def computed(q, k, v, grad, causal, scale, heads_last=7):
    """Returns the result, the logarithms to the base 2, and the gradients."""
    out, sums = torch.ops.sidefx.attention(q, k, v, causal, scale, heads_last & 1)
    return out, sums, *torch.ops.sidefx.attention_backward(grad, q, k, v, out, sums, causal, scale, heads_last)


def wanted_of(q, k, v, grad, causal, scale):
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    scores = q @ k.transpose(2, 3) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[2:], dtype=torch.bool).tril(), -math.inf)
    out = scores.softmax(-1) @ v
    return out, scores.logsumexp(-1) / math.log(2), *torch.autograd.grad(out, (q, k, v), grad.double())


def laid_out(rows, heads, length, width, layout):
    if layout == "packed":
        return torch.randn(rows, length, 3, heads, width)[:, :, 1].transpose(1, 2)
    if layout == "any":
        return torch.randn(width, rows, length, heads).permute(1, 3, 2, 0)
    return torch.randn(rows, heads, length, width)


SIZES = [
    (1, 1, 1, 1, 1),
    (2, 3, 5, 7, 3),
    (4, 4, 32, 32, 16),
    (1, 2, 17, 17, 24),
    (3, 2, 64, 64, 32),
    (2, 1, 65, 63, 40),
    (1, 3, 128, 129, 33),
    (1, 2, 200, 130, 64),
    (1, 1, 130, 300, 80),
    (1, 5, 257, 31, 130),
    (1, 1, 513, 513, 8),
]


@pytest.mark.parametrize("rows, heads, queries, keys, width", SIZES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["packed", "plain", "any"])
@pytest.mark.every(3)
def test_results_and_gradients_are_those_of_float64(rows, heads, queries, keys, width, causal, layout, threads):
    torch.manual_seed(0)
    q, k, v, grad = (laid_out(rows, heads, n, width, layout) for n in (queries, keys, keys, queries))
    have = computed(q, k, v, grad, causal, width**-0.5)
    for a, b in zip(have, wanted_of(q, k, v, grad, causal, width**-0.5), strict=True):
        assert (a - b).abs().max() <= 3e-6 * max(b.abs().max().item(), 1e-2)
    again = computed(q, k, v, grad, causal, width**-0.5)
    assert all(torch.equal(a, b) for a, b in zip(have, again, strict=True)), "from run to run"


@pytest.mark.parametrize("heads_last", range(8))
def test_what_is_made_lies_as_asked_for(heads_last):
    torch.manual_seed(0)
    q, k, v, grad = (laid_out(2, 3, n, 20, "packed") for n in (9, 11, 11, 9))
    have, want = computed(q, k, v, grad, True, 0.3, heads_last), computed(q, k, v, grad, True, 0.3)
    for i, (a, b) in enumerate(zip((have[0], *have[2:]), (want[0], *want[2:]), strict=True)):
        assert torch.equal(a, b)
        is_heads_last = heads_last & 1 if i == 0 else heads_last >> (i - 1) & 1
        assert (a.transpose(1, 2) if is_heads_last else a).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_side_by_side(dtype):
    torch.manual_seed(0)
    q, k, v, grad = (laid_out(2, 3, 70, 20, "packed").to(dtype) for _ in range(4))
    out, sums, *grads = computed(q, k, v, grad, True, 0.3)
    joined = torch.ops.sidefx.attention_backward_joined(grad, q, k, v, out, sums, True, 0.3)
    assert torch.equal(joined, torch.cat([t.transpose(1, 2).reshape(2, 70, 60) for t in grads], 2))


@pytest.mark.parametrize("layout", ["packed", "any"])
@pytest.mark.parametrize("width", [16, 20])
def test_bfloat16(layout, width, threads):
    torch.manual_seed(0)
    q, k, v, grad = (laid_out(2, 3, 70, width, layout).bfloat16() for _ in range(4))
    out, sums, *grads = computed(q, k, v, grad, True, width**-0.5)
    want = wanted_of(q, k, v, grad, True, width**-0.5)
    assert sums.dtype == torch.float32 and (sums - want[1]).abs().max() < 1e-5
    for a, b in zip((out, *grads), (want[0], *want[2:]), strict=True):
        assert a.dtype == torch.bfloat16 and (a - b).norm() <= 5e-3 * b.norm()


@pytest.mark.parametrize("factor", [1e-20, 1.0, 7.0, 50.0])
@pytest.mark.parametrize("scale", [-2.0, 0.0, 0.1, 3.0])
def test_scores_of_any_size(factor, scale):
    torch.manual_seed(0)
    q, k, v, grad = (laid_out(1, 2, 150, 8, "packed") for _ in range(4))
    q, k = q * factor, k * factor
    out, _, dq, dk, dv = computed(q, k, v, grad, True, scale)
    want = wanted_of(q, k, v, grad, True, scale)
    inner = 1e-6 * factor * abs(scale) * 150  # where a weight is nearly 1, gradients of scores are small differences
    for a, b, least in zip((out, dv, dq, dk), (want[0], want[4], want[2], want[3]), (0, 0, inner, inner), strict=True):
        assert (a - b).norm() <= 2e-4 * b.norm() + least


def test_the_largest_score_may_come_late():
    q, k, v = torch.full((1, 1, 3, 4), 30.0), torch.arange(300.0).view(1, 1, 300, 1).expand(1, 1, 300, 4) - 250, None
    v = torch.randn(1, 1, 300, 4)
    out, sums, *_ = computed(q, k, v, torch.ones(1, 1, 3, 4), False, 0.5)
    torch.testing.assert_close(out, v[:, :, -1:].expand_as(out))
    torch.testing.assert_close(sums.double(), wanted_of(q, k, v, torch.ones_like(q), False, 0.5)[1], rtol=1e-6, atol=0)


def test_where_all_scores_are_minus_infinity_there_are_zeros():
    """The same as torch's kernel."""
    torch.manual_seed(0)
    q, k, v, grad = (laid_out(1, 1, 20, 8, "plain") for _ in range(4))
    k = k.abs() * 10
    q[0, 0, 3] = -1e38
    fused, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    want = backward(grad, q, k, v, fused, lse, 0.0, False)
    out, _, *grads = computed(q, k, v, grad, False, 8**-0.5)
    assert (out[0, 0, 3] == 0).all()
    for a, b in zip((out, *grads), (fused, *want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_no_number_stays_none():
    torch.manual_seed(0)
    q, k, v, grad = (laid_out(1, 2, 20, 8, "packed") for _ in range(4))
    q[0, 0, 5], k[0, 1, 7] = math.nan, math.nan
    out, _, dq, _, _ = computed(q, k, v, grad, True, 1.0)
    assert out[0, 0].isnan().any(-1).tolist() == [i == 5 for i in range(20)]
    assert out[0, 1].isnan().any(-1).tolist() == [i >= 7 for i in range(20)]
    assert dq[0, 0].isnan().any(-1).tolist() == [i == 5 for i in range(20)]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86")
@pytest.mark.parametrize("level", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_with_the_vectors_of_other_processors(level, monkeypatch, tmp_path):
    has = torch.backends.cpu.get_cpu_capability()
    if level > "x86-64-v2" and not has.startswith("AVX512" if level == "x86-64-v4" else "AVX"):
        pytest.skip(f"not on this processor, which has {has}")
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, f"-march={level}"))
    fresh = dataclasses.replace(build._ATTENTION, done=False, module=None, lock=threading.Lock())
    module = fresh.get()
    assert module is not None
    monkeypatch.setattr(native_attention, "attention_module", lambda: module)
    torch.manual_seed(0)
    for rows, heads, queries, keys, width in SIZES:
        for causal in (False, True):
            q, k, v, grad = (laid_out(rows, heads, n, width, "packed") for n in (queries, keys, keys, queries))
            have, want = (f(q, k, v, grad, causal, width**-0.5) for f in (computed, wanted_of))
            for a, b in zip(have, want, strict=True):
                assert (a - b).abs().max() <= 3e-6 * max(b.abs().max().item(), 1e-2)


# --- in a step ---------------------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """Self-attention or cross-attention; ``how`` selects how the projections are split into heads."""

    def __init__(self, how, causal=True, **settings):
        super().__init__()
        self.how, self.settings = how, {"is_causal": causal, **settings}
        self.q, self.kv, self.qkv = nn.Linear(20, 20), nn.Linear(20, 40), nn.Linear(20, 60)
        self.out = nn.Linear(20, 20)

    def forward(self, x):
        rows, length, _ = x.shape
        if self.how == "cross":
            y = x[:, 2:].flip(1)
            q, k, v = self.q(x), *self.kv(y).split(20, 2)
        else:
            q, k, v = self.qkv(x).split(20, 2)
        q, k, v = (t.view(rows, t.shape[1], 4, 5).transpose(1, 2) for t in (q, k, v))
        if self.how == "contiguous":
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if self.how == "heads_last":
            q, k = (torch.cat([t[..., 2:], -t[..., :2]], -1) * 0.9 + t for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, **self.settings)
        return self.out(y.transpose(1, 2).reshape(rows, length, 20))


def trained(model, compiled, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)

    def step(x):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False)):
            y = model(x.to(next(model.parameters()).dtype))
        loss = y.float().square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    settings = {name: value for name, value in options.items() if name != "autocast"}
    run = sidefx_train.compile(step, fullgraph=True, **settings) if compiled else step
    losses = [run(torch.randn(2, 9, 20, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    return losses + [p.detach().clone() for p in model.parameters()] + [
        p.grad for p in model.parameters() if p.grad is not None
    ], run


def both(make, **options):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        results.append(trained(make(), compiled, **(options if compiled or "autocast" in options else {})))
    return results[0][0], *results[1]


EVERY_LAYOUT = [
    # The tests above run the kernel with every setting in every layout: ``make slow`` has the other steps.
    pytest.param(how, settings, marks=pytest.mark.slow if settings and how in ("contiguous", "heads_last") else ())
    for how in ("packed", "contiguous", "heads_last", "cross")
    for settings in ({}, {"causal": False}, {"scale": 0.7})
]


@pytest.mark.parametrize(("how", "settings"), EVERY_LAYOUT)
@pytest.mark.every(4)
def test_a_step_is_that_of_eager(chosen, how, settings):
    want, have, run = both(lambda: Mixer(how, **settings))
    for a, b in zip(want, have, strict=True):
        assert a.stride() == b.stride() and (a - b).norm() <= 1e-5 * a.norm()
    report = run.report()
    assert f"1 of 1 {NOTE}" in report.captures[0].notes
    sources = report.sources()
    assert "aoti_torch_sidefx_attention(" in sources["inductor"] and "flash" not in sources["graph"]
    joined = "aoti_torch_sidefx_attention_backward_joined(" in sources["inductor"]
    assert joined is (how in ("packed", "contiguous"))
    (choice,) = [each for each in report.captures[0].choices if each.what.startswith("attention (2, 4, 9, 5)")]
    assert choice.chosen == "native" and ("of 7 keys" in choice.what) is (how == "cross")


@pytest.mark.slow
def test_layers_share_parts(chosen):
    want, have, run = both(lambda: nn.Sequential(*(Mixer("packed") for _ in range(6))))
    for a, b in zip(want, have, strict=True):
        assert (a - b).norm() <= 2e-5 * a.norm()
    assert f"6 of 6 {NOTE}" in run.report().captures[0].notes


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("how", ["packed", "heads_last"])
@pytest.mark.every(4)
def test_a_step_in_bfloat16(chosen, autocast, how):
    make = lambda: Mixer(how) if autocast else Mixer(how).bfloat16()  # noqa: E731
    want, have, run = both(make, autocast=autocast)
    for a, b in zip(want, have, strict=True):
        assert a.dtype == b.dtype and (a - b).float().norm() <= 2e-2 * a.float().norm()
    assert f"1 of 1 {NOTE}" in run.report().captures[0].notes


@pytest.mark.parametrize("settings", [{"dropout_p": 0.1}, {"attn_mask": torch.zeros(9, 9)}])
@pytest.mark.every(2)
def test_others_stay(chosen, settings):
    torch.manual_seed(0)
    found, run = trained(Mixer("packed", causal=False, **settings), True)
    assert all(torch.isfinite(each).all() for each in found) and run.report().fallback_count == 0
    assert not any(NOTE in note for note in run.report().captures[0].notes)


def test_without_gradients(chosen):
    torch.manual_seed(0)
    model, x = Mixer("packed"), torch.randn(2, 9, 20)
    call = sidefx_train.compile(torch.no_grad()(lambda x: model(x)), fullgraph=True)
    with torch.no_grad():
        want = model(x)
    for _ in range(3):
        torch.testing.assert_close(call(x), want, rtol=1e-5, atol=1e-6)


def test_a_forward_without_its_backward_stays_fused(chosen):
    """A model compiled alone: its backward is a separate graph that reads the log-sum-exp."""
    torch.manual_seed(0)
    model, x = Mixer("packed"), torch.randn(2, 9, 20)
    call = sidefx_train.compile(model, fullgraph=True)
    pairs = [torch.autograd.grad(f(x).square().sum(), [model.qkv.weight]) for f in (model, call, call)]
    for have in pairs[1:]:
        torch.testing.assert_close(have[0], pairs[0][0], rtol=1e-5, atol=1e-6)


def test_where_it_is_not_chosen_torchs_stays(chosen, monkeypatch):
    torch.manual_seed(0)
    _, run = trained(Mixer("packed"), True, autotune="off")
    assert "flash" in run.report().sources()["graph"] and not run.report().captures[0].choices
    monkeypatch.setattr(attention, "timings", lambda tasks: dict.fromkeys(tasks, {"fused": 1.0, "native": 1.1}))
    _, run = trained(Mixer("contiguous"), True)
    assert "flash" in run.report().sources()["graph"]
    (choice,) = [each for each in run.report().captures[0].choices if each.what.startswith("attention")]
    assert choice.chosen == "fused" and choice.seconds == {"fused": 1.0, "native": 1.1}


@pytest.mark.slow
def test_python_calls_it_too(chosen, monkeypatch):
    """The graph is not one C++ call."""
    monkeypatch.setattr(sidefx_train.compile.backend.inductor_options, "_one_cpp_call", lambda module: False)
    torch.manual_seed(0)
    x = torch.randn(2, 9, 60, requires_grad=True)

    def gradient(x):
        q, k, v = (t.view(2, 9, 4, 5).transpose(1, 2) for t in x.split(20, 2))
        joined = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        apart = F.scaled_dot_product_attention(q * 2, k.contiguous(), v + q)
        return torch.autograd.grad((joined + apart).square().sum(), x)[0]

    call = sidefx_train.compile(gradient, fullgraph=True)
    want = gradient(x)
    for _ in range(3):
        assert (call(x) - want).norm() <= 1e-5 * want.norm()
    report = call.report()
    assert f"2 of 2 {NOTE}" in report.captures[0].notes
    assert "inductor_entry_impl" not in report.sources()["inductor"]


def test_all_lengths_are_measured():
    found = attention._measure([1, 2, 8, 4], True, 1, "float32", 5)
    assert set(found) == {"fused", "native"} and all(0 < seconds < 1 for seconds in found.values())
    assert set(attention._measure([4, 64, 256, 8], True, 1)) == {"fused", "native"}


def test_without_the_native_module_the_others_are_measured(monkeypatch):
    monkeypatch.setattr(attention, "attention_module", lambda: None)
    assert set(attention._measure([1, 2, 8, 4], True, 1)) == {"fused", "products", "tiles"}


STORED = """
import torch, sidefx_train
from torch import nn
from torch.nn import functional as F
from sidefx_train.compile.backend.autotune import attention
attention.timings = lambda tasks: dict.fromkeys(tasks, {"fused": 1.0, "native": 0.1})
torch.manual_seed(0)
layer, x = nn.Linear(8, 24), torch.randn(2, 5, 8)
def loss(x):
    q, k, v = (t.view(2, 5, 2, 4).transpose(1, 2) for t in layer(x).split(8, 2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()
@sidefx_train.compile
def step(x):
    layer.zero_grad()
    loss(x).backward()
for _ in range(3):
    step(x)
want = [p.grad for p in layer.parameters()]
layer.zero_grad()
loss(x).backward()
for p, have in zip(layer.parameters(), want):
    torch.testing.assert_close(have, p.grad, rtol=1e-5, atol=1e-6)
print(*step.report().captures[0].notes, sep="; ")
"""


@pytest.mark.slow
def test_a_later_process_takes_it_from_the_cache(tmp_path, monkeypatch):
    new_cache(tmp_path, monkeypatch)
    notes = [
        subprocess.run([sys.executable, "-c", STORED], capture_output=True, text=True, check=True).stdout for _ in "ab"
    ]
    assert all(f"1 of 1 {NOTE}" in note for note in notes)
    assert ["from the cache" in note for note in notes] == [False, True]


def test_a_caller_of_attention_needs_no_header_of_torchs():
    from sidefx_train.compile.backend.cpp_codegen.python_entry import kernels_called

    names = ("attention", "attention_backward", "attention_backward_joined", "lstm")
    calls = "".join(f"{compat.KERNEL_FUNCTION}{name}(stack, a, b);" for name in names)
    assert header_free_wrapper(kernels_called(calls) + calls) is not None


class HeadsFirst(nn.Module):
    """Splits heads without a transpose; with as many heads as positions, the shapes equal those with one."""

    def __init__(self):
        super().__init__()
        self.packed = nn.Linear(32, 96)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (t.reshape(rows, 8, length, width // 8) for t in self.packed(x).split(width, 2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(rows, length, width)


def test_gradients_are_not_joined_without_transposed_heads(chosen):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 32)
    have, want = HeadsFirst(), HeadsFirst()
    have.load_state_dict(want.state_dict())

    def step_of(model):
        def step(x):
            loss = model(x).square().sum()
            loss.backward()
            return loss.detach()

        return step

    compiled = sidefx_train.compile(step_of(have), fullgraph=True)
    compiled(x)
    step_of(want)(x)
    assert any(NOTE in note for note in compiled.report().captures[0].notes)
    for ours, eager in zip(have.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, eager.grad, rtol=1e-4, atol=1e-5)
