"""LSTM layers in the native module compute the results of oneDNN; unsupported cases stay with oneDNN."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.autotune import lstm
from sidefx_train.compile.backend.autotune.lstm import INPUT, STATES, WEIGHTS
from sidefx_train.compile.backend.cpp_codegen.wrapper_prelude import header_free_wrapper
from tests.support.disk_cache import new_cache

ALL = INPUT | WEIGHTS | STATES


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    new_cache(tmp_path, monkeypatch)  # cached graphs that were lowered with other timings are not used
    monkeypatch.setattr(lstm, "timings", lambda tasks: dict.fromkeys(tasks, {"onednn": 1.0, "native": 0.1}))
    with compat.inductor_options({"cpp_cache_precompile_headers": False}):
        yield


def wanted_of(x, weights, hx, cx, reverse, grads):
    """Returns results and gradients in float64."""
    leaves = [t.double().clone().requires_grad_() for t in (x, *weights, hx, cx)]
    x, w_ih, w_hh, b_ih, b_hh, h, c = leaves
    out = [h] * len(x)
    for at in reversed(range(len(x))) if reverse else range(len(x)):
        i, f, g, o = (x[at] @ w_ih.t() + h @ w_hh.t() + b_ih + b_hh).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = out[at] = o.sigmoid() * c.tanh()
    results = (torch.stack(out), h, c)
    loss = sum((r * g.double()).sum() for r, g in zip(results, grads, strict=True) if g is not None)
    made = torch.autograd.grad(loss, leaves)
    return results, (*made[:4], *made[5:])


SIZES = [
    (1, 1, 1, 1),
    (2, 3, 5, 4),
    (7, 5, 16, 16),
    (6, 4, 33, 17),
    (9, 37, 70, 100),
    (130, 1, 3, 20),
    (5, 7, 129, 65),
    (3, 200, 10, 48),
    (12, 32, 64, 128),
]


@pytest.mark.parametrize("length, rows, inputs, units", SIZES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layout", ["plain", "rows first", "zeros"])
@pytest.mark.every(3)
def test_results_and_gradients_are_those_of_float64(length, rows, inputs, units, reverse, layout, threads):
    torch.manual_seed(0)
    weights = [torch.empty(4 * units, *s).uniform_(-(units**-0.5), units**-0.5) for s in ((inputs,), (units,), (), ())]
    x, grad = torch.randn(length, rows, inputs), torch.randn(length, rows, units)
    grads, states = [grad, torch.randn(rows, units), torch.randn(rows, units)], [torch.randn(rows, units)] * 2
    if layout == "rows first":
        x = torch.randn(rows, length, inputs).transpose(0, 1)
        grads = [torch.randn(units, rows, length).permute(2, 1, 0), torch.randn(1).expand(rows, units), None]
    if layout == "zeros":
        states, grads = [None, None], [torch.randn(1).expand(length, rows, units), None, None]
    out, hy, cy, kept = torch.ops.sidefx.lstm(x, *weights, *states, reverse, True)
    made = torch.ops.sidefx.lstm_backward(x, *weights[:2], *states, out, kept, *grads, reverse, ALL)
    zeros = torch.zeros(rows, units)
    hx, cx = (zeros if state is None else state for state in states)
    results, gradients = wanted_of(x, weights, hx, cx, reverse, grads)
    gradients = [*gradients[:4], *gradients[3:]]  # one for each bias
    for have, want in zip((out, hy, cy, *made), (*results, *gradients), strict=True):
        assert have.is_contiguous() and have.shape == want.shape
        assert (have - want).abs().max() <= 5e-6 * want.abs().max()
    bare = torch.ops.sidefx.lstm(x, *weights, *states, reverse, False)
    assert all(torch.equal(a, b) for a, b in zip(bare[:3], (out, hy, cy), strict=True)) and bare[3].numel() == 0


@pytest.mark.parametrize("wanted", [0, INPUT, WEIGHTS, STATES, INPUT | STATES])
def test_what_is_not_wanted_is_not_made(wanted):
    torch.manual_seed(0)
    weights, x, hx = [torch.randn(36, n) for n in (5, 9)], torch.randn(4, 3, 5), torch.randn(3, 9)
    out, _, _, kept = torch.ops.sidefx.lstm(x, *weights, None, None, hx, hx, False, True)
    given = (x, *weights, hx, hx, out, kept, torch.ones_like(out), None, None, False)
    whole, some = (torch.ops.sidefx.lstm_backward(*given, flags) for flags in (ALL, wanted))
    for i, (a, b) in enumerate(zip(whole, some, strict=True)):
        if wanted & (INPUT, *[WEIGHTS] * 4, *[STATES] * 2)[i]:
            assert torch.equal(a, b)
        else:
            assert b.numel() == 0 and b.dim() == a.dim()


@pytest.mark.parametrize("value", [0.0, 1e-6, 0.3, -7.0, 20.0, -60.0, 1e4, -1e30, float("inf"), float("-inf")])
def test_gates_of_any_size(value):
    """One step whose gates are all ``value``; the cell begins at 0.5."""
    bias = torch.full((4,), value)
    given = (
        torch.zeros(1, 1, 1),
        torch.zeros(4, 1),
        torch.zeros(4, 1),
        bias,
        torch.zeros(4),
        None,
        torch.full((1, 1), 0.5),
    )
    _, hy, cy, _ = torch.ops.sidefx.lstm(*given, False, False)
    s, t = torch.tensor(value).double().sigmoid(), torch.tensor(value).double().tanh()
    torch.testing.assert_close(cy[0, 0].double(), 0.5 * s + s * t, rtol=1e-6, atol=1e-37)
    torch.testing.assert_close(hy[0, 0].double(), s * (0.5 * s + s * t).tanh(), rtol=1e-6, atol=1e-37)


def test_no_number_stays_none():
    x = torch.full((3, 2, 4), float("nan"))
    x[:, 1] = 1.0
    out = torch.ops.sidefx.lstm(x, torch.ones(32, 4), torch.ones(32, 8), None, None, None, None, False, False)[0]
    assert out[:, 0].isnan().all() and not out[:, 1].isnan().any()


class Reader(nn.Module):
    def __init__(self, states=False, **settings):
        super().__init__()
        self.rnn = nn.LSTM(6, 10, **settings)
        layers = settings.get("num_layers", 1) * (1 + settings.get("bidirectional", False))
        width = settings.get("proj_size") or 10
        self.states = nn.ParameterList([torch.randn(layers, 4, n) for n in (width, 10)] if states else [])
        self.head = nn.Linear(width * (1 + settings.get("bidirectional", False)), 3)

    def forward(self, x):
        out, (h, c) = self.rnn(x, tuple(self.states)) if len(self.states) else self.rnn(x)
        return self.head(out).square().sum() + (h.sum() + c.square().sum() if len(self.states) else 0.0)


def trained(model, compiled, x_grad=False, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach(), x.grad

    run = sidefx_train.compile(step, fullgraph=True, **options) if compiled else step
    found = []
    for i in range(3):
        x = torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(i)).requires_grad_(x_grad)
        found += [each.clone() for each in run(x) if each is not None]
    return found + [p.detach().clone() for p in model.parameters()] + [p.grad for p in model.parameters()], run


CASES = {
    "plain": ({}, 1),
    "rows first": ({"batch_first": True}, 1),
    "without biases": ({"bias": False}, 1),
    "both directions": ({"bidirectional": True, "batch_first": True}, 2),
    "states with gradients": ({"states": True, "num_layers": 2, "batch_first": True}, 2),
    "two layers, both directions, no biases": ({"num_layers": 2, "bidirectional": True, "bias": False}, 4),
}


WITHOUT_X_GRAD = ("plain", "two layers, both directions, no biases")
"""Cases in which the first layer's input needs no gradient, with one layer and with several."""


@pytest.mark.parametrize(
    ("name", "x_grad"),
    [
        *((name, True) for name in CASES),
        *(pytest.param(name, False, marks=[] if name in WITHOUT_X_GRAD else pytest.mark.slow) for name in CASES),
    ],
)
@pytest.mark.every(4)
def test_a_step_is_that_of_eager(chosen, name, x_grad):
    settings, layers = CASES[name]
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        results.append(trained(Reader(**settings), compiled, x_grad=x_grad))
    (want, _), (have, run) = results
    for a, b in zip(want, have, strict=True):
        assert a.stride() == b.stride() and (a - b).norm() <= 1e-5 * a.norm()
    report = run.report()
    assert f"{layers} of {layers} recurrent layers by the native module" in report.captures[0].notes
    code = report.sources()["inductor"]
    assert "aoti_torch_sidefx_lstm(" in code and "aoti_torch_sidefx_lstm_backward(" in code and "rnn_layer" not in code


@pytest.mark.parametrize("options", [{}, {"autotune": "off"}, {"backend": "aot_eager"}, {"backend": "eager"}])
@pytest.mark.every(2)
def test_gradients_of_two_biases_have_memory_of_their_own(chosen, options):
    model = Reader()
    trained(model, True, **options)
    first, second = model.rnn.bias_ih_l0.grad, model.rnn.bias_hh_l0.grad
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()


def test_frozen_weights(chosen):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Reader()
        model.rnn.requires_grad_(False)
        results.append([t for t in trained(model, compiled, x_grad=True)[0] if t is not None])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()


@pytest.mark.parametrize(
    "case",
    ["projected", *(pytest.param(case, marks=pytest.mark.slow) for case in ("dropout between layers", "in float64"))],
)
@pytest.mark.slow
def test_others_run(chosen, case):
    settings = {"projected": {"proj_size": 4}, "dropout between layers": {"num_layers": 2, "dropout": 0.5}}.get(
        case, {}
    )
    torch.manual_seed(0)
    model = Reader(**settings)
    if case == "in float64":
        model, x = model.double(), torch.randn(2, 4, 6).double()
        assert sidefx_train.compile(model)(x).dtype == torch.float64
        return
    found, run = trained(model, True)
    assert all(torch.isfinite(each).all() for each in found) and run.report().fallback_count == 0
    text = "recurrent layers by the native module"
    assert any(text in note for note in run.report().captures[0].notes) is (case != "projected")


def test_a_forward_without_its_backward_stays(chosen):
    """A model compiled alone: its backward is a separate graph that reads oneDNN's workspace."""
    torch.manual_seed(0)
    model, x = nn.LSTM(6, 10), torch.randn(4, 7, 6)
    call = sidefx_train.compile(model, fullgraph=True)
    pairs = [torch.autograd.grad(f(x)[0].square().sum(), list(model.parameters())) for f in (model, call, call)]
    for have in pairs[1:]:
        for a, b in zip(pairs[0], have, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


def test_without_gradients_nothing_is_kept(chosen):
    model, x = nn.LSTM(6, 10), torch.randn(4, 7, 6)
    call = sidefx_train.compile(torch.no_grad()(lambda x: model(x)), fullgraph=True)
    with torch.no_grad():
        want = model(x)
    for _ in range(3):
        have = call(x)
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)
    assert "1 of 1 recurrent layers by the native module" in call.report().captures[0].notes


def test_where_nothing_is_chosen_onednn_stays(monkeypatch, chosen):
    torch.manual_seed(0)
    _, run = trained(Reader(), True, autotune="off")
    assert "sidefx::rnn_layer" in run.report().sources()["inductor"]
    monkeypatch.setattr(lstm, "timings", lambda tasks: dict.fromkeys(tasks, {"onednn": 1.0, "native": 1.1}))
    _, run = trained(Reader(batch_first=True), True)
    assert "sidefx::rnn_layer" in run.report().sources()["inductor"]
    (choice,) = [each for each in run.report().captures[0].choices if each.what.startswith("lstm 7 steps 4 rows")]
    assert choice.chosen == "onednn" and choice.seconds == {"onednn": 1.0, "native": 1.1}


@pytest.mark.slow
def test_python_calls_it_too(chosen, monkeypatch):
    """The graph is not one C++ call."""
    monkeypatch.setattr(sidefx_train.compile.backend.inductor_options, "_one_cpp_call", lambda module: False)
    torch.manual_seed(0)
    model, x = nn.LSTM(6, 10, bidirectional=True), torch.randn(4, 7, 6)

    def gradients(x):
        return torch.autograd.grad(model(x)[0].square().sum(), list(model.parameters()))

    call = sidefx_train.compile(gradients, fullgraph=True)
    for _ in range(3):
        for have, want in zip(call(x), gradients(x), strict=True):
            assert (have - want).norm() <= 1e-5 * want.norm()
    report = call.report()
    assert "2 of 2 recurrent layers by the native module" in report.captures[0].notes
    assert "inductor_entry_impl" not in report.sources()["inductor"]


def test_both_ways_are_measured():
    for wanted in (0, WEIGHTS, ALL):
        found = lstm._measure(5, 3, 4, 6, wanted, 1)
        assert set(found) == {"onednn", "native"} and all(0 < seconds < 1 for seconds in found.values())


def test_of_a_long_sequence_a_part_is_measured():
    assert lstm._part(16, 8, 32, 32) == 16
    assert lstm._part(32, 32, 128, 128) == 8
    assert lstm._part(4, 512, 512, 512) == 4


STORED = """
import torch, sidefx_train
from torch import nn
from sidefx_train.compile.backend.autotune import lstm
lstm.timings = lambda tasks: dict.fromkeys(tasks, {"onednn": 1.0, "native": 0.1})
torch.manual_seed(0)
model, x = nn.LSTM(6, 10), torch.randn(4, 7, 6)
@sidefx_train.compile
def step(x):
    model.zero_grad()
    model(x)[0].sum().backward()
for _ in range(3):
    step(x)
want = [p.grad for p in model.parameters()]
model.zero_grad()
model(x)[0].sum().backward()
for p, have in zip(model.parameters(), want):
    torch.testing.assert_close(have, p.grad, rtol=1e-5, atol=1e-6)
print(*step.report().captures[0].notes, sep="; ")
"""


@pytest.mark.slow
def test_a_later_process_takes_it_from_the_cache(tmp_path, monkeypatch):
    new_cache(tmp_path, monkeypatch)
    notes = [
        subprocess.run([sys.executable, "-c", STORED], capture_output=True, text=True, check=True).stdout for _ in "ab"
    ]
    assert all("1 of 1 recurrent layers by the native module" in note for note in notes)
    assert ["from the cache" in note for note in notes] == [False, True]


def test_without_the_native_module_onednn_is_used(monkeypatch):
    monkeypatch.setattr(lstm, "lstm_module", lambda: None)
    assert set(lstm._measure(5, 3, 4, 6, ALL, 1)) == {"onednn"}


def test_a_caller_of_layers_needs_no_header_of_torchs():
    from sidefx_train.compile.backend.cpp_codegen.python_entry import kernels_called

    calls = "".join(f"{compat.KERNEL_FUNCTION}{name}(stack, a, b);" for name in ("lstm", "lstm_backward"))
    assert header_free_wrapper(kernels_called(calls) + calls) is not None
