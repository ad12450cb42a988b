"""Numbers that change from call to call as arguments of operators: one graph for all values, and eager's results."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import sidefx_train

TARGET = torch.tensor([1, 0, 3, 2])
VALUES = (0.3, 0.33, 0.35, 0.45, 0.61)

STEPS = {
    "dropout": lambda x, v: F.dropout(x, v),
    "dropout in place": lambda x, v: F.dropout(x * 1, v, inplace=True),
    "dropout of channels": lambda x, v: F.dropout1d(x[None], v),
    "alpha dropout": lambda x, v: F.alpha_dropout(x, v, training=True),
    "label smoothing": lambda x, v: F.cross_entropy(x, TARGET, label_smoothing=v),
    "label smoothing of probabilities": lambda x, v: F.cross_entropy(x, x.softmax(-1).detach(), label_smoothing=v),
    "lerp": lambda x, v: x.lerp(x * 2, v),
    "lerp in place": lambda x, v: (x * 1).lerp_(x * 2, v),
    "pow": lambda x, v: (x.abs() + 0.1).pow(v),
    "pow operator": lambda x, v: (x.abs() + 0.1) ** (v + 2),
    "square": lambda x, v: x.abs() ** (v + 1),
    "huber": lambda x, v: F.huber_loss(x, x.detach() * 2, delta=v),
    "smooth l1": lambda x, v: F.smooth_l1_loss(x, x.detach() * 2, beta=v),
    "margin": lambda x, v: F.triplet_margin_loss(x, x * 2, x - 1, margin=v),
    "margins of a ranking": lambda x, v: F.margin_ranking_loss(x, x * 2, torch.ones(4, 4), margin=v),
    "margin of an embedding": lambda x, v: F.hinge_embedding_loss(x, x.detach().sign(), margin=v),
    "norm": lambda x, v: torch.linalg.vector_norm(x, v + 2),
    "norm below one": lambda x, v: x.norm(v),
    "norm of rows": lambda x, v: F.normalize(x, p=v + 1, dim=0),
    "distance": lambda x, v: torch.cdist(x, x * 2, v + 1),
    "attention": lambda x, v: F.scaled_dot_product_attention(*[x.view(1, 1, 4, 4)] * 3, scale=v),
    "attention with a mask": lambda x, v: F.scaled_dot_product_attention(
        *[x.view(1, 1, 4, 4)] * 3, attn_mask=x.detach(), scale=v
    ),
    "normal": lambda x, v: x + torch.empty(4, 4).normal_(0, v),
    "uniform": lambda x, v: x + torch.empty(4, 4).uniform_(-v, v),
    "bernoulli": lambda x, v: x * torch.empty(4, 4).bernoulli_(v),
    "momentum": lambda x, v: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True, momentum=v),
    "eps of a batch norm": lambda x, v: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True, eps=v),
    "eps and momentum": lambda x, v: F.batch_norm(x, torch.zeros(4), torch.ones(4), None, None, True, v, v / 2),
    "eps in evaluation": lambda x, v: F.batch_norm(x, torch.zeros(4), torch.ones(4), eps=v),
    "eps of an instance norm": lambda x, v: F.instance_norm(x[None], eps=v),
    "eps of an rms norm": lambda x, v: F.rms_norm(x, (4,), eps=v),
    "eps of an rms norm in double": lambda x, v: F.rms_norm(x.double(), (4,), eps=v).float(),
    "celu": lambda x, v: F.celu(x, v),
    "celu in place": lambda x, v: F.celu(x * 1, v, inplace=True),
    "variance": lambda x, v: x.var(1, correction=v * 3),
    "deviation": lambda x, v: torch.std(x, (0, 1), correction=v * 3),
    "variance and mean": lambda x, v: torch.stack(torch.var_mean(x, correction=v * 3)),
    "correction": lambda x, v: torch.std(x, 1, correction=int(v * 100) % 3),
    "elu": lambda x, v: F.elu(x, v),
    "leaky relu": lambda x, v: F.leaky_relu(x, v),
    "softplus": lambda x, v: F.softplus(x, v),
    "hardtanh": lambda x, v: F.hardtanh(x, -v, v),
    "clamp": lambda x, v: x.clamp(-v, v),
    "addmm": lambda x, v: torch.addmm(x, x, x, alpha=v, beta=v * 2),
    "threshold": lambda x, v: F.threshold(x, v, 0.0),
    "softshrink": lambda x, v: F.softshrink(x, v),
    "random slopes": lambda x, v: F.rrelu(x, v / 4, v, training=True),
    "margin of classes": lambda x, v: F.multi_margin_loss(x, TARGET, margin=v),
    "dropout that does not train": lambda x, v: F.dropout(x, v, training=False),
    "alpha dropout that does not train": lambda x, v: F.alpha_dropout(x, v),
    "eps that is not used": lambda x, v: F.poisson_nll_loss(x, x.detach().exp(), eps=v),
    "range from a number": lambda x, v: x * torch.arange(v, v + 4),
    "range up to a number": lambda x, v: x * torch.arange(0, 4 * v, step=v, dtype=torch.float64),
    "range down to a number": lambda x, v: x.sum() * torch.arange(1, -v, -v / 2).sum(),
    "spaced by powers": lambda x, v: x * torch.logspace(0, 2, 4, base=v),
    "statistics of an operator": lambda x, v: torch.ops.aten._native_batch_norm_legit(
        x, None, None, torch.zeros(4), torch.ones(4), True, v, v / 2
    )[0],
    "filled where a mask is false": lambda x, v: torch.ops.aten._unsafe_masked_index(
        x, x.detach() > 0, [TARGET[:, None], TARGET[None]], v
    ),
    "normal numbers": lambda x, v: x + torch.normal(v, v / 2, (4, 4)),
    "trapezoid": lambda x, v: torch.trapezoid(x, dx=v),
    "sums of trapezoids": lambda x, v: torch.cumulative_trapezoid(x, dx=v),
    "norm of linalg": lambda x, v: torch.linalg.norm(x[0], v + 2),
    "place among numbers": lambda x, v: x * torch.searchsorted(torch.arange(8.0) / 8, v),
    "place among integers": lambda x, v: x * torch.searchsorted(torch.arange(8), v * 8, right=True),
    "bucket": lambda x, v: x * torch.bucketize(v * 8, torch.arange(8)),
    "spaced": lambda x, v: x * torch.linspace(-v, v * 2, 4),
    "spaced by a factor": lambda x, v: x * torch.logspace(v, 1, 4, base=2.0),
    "tolerance": lambda x, v: x * torch.isclose(x, x.detach().round(), atol=v),
    "two tolerances": lambda x, v: x * torch.isclose(x, x.detach().round(), v / 2, v),
    "times a logarithm": lambda x, v: torch.xlogy(v, x.exp()),
    "times a logarithm of one more": lambda x, v: torch.special.xlog1py(v, x.exp()) + torch.special.xlog1py(x, v),
    "zeta": lambda x, v: x * torch.special.zeta(x.detach().abs() + 2, v),
    "polynomial": lambda x, v: x * torch.special.hermite_polynomial_h(x.detach(), v * 8),
    "among numbers": lambda x, v: x * torch.isin(torch.tensor([0.3, 0.35, 0.4, 0.61]), v),
    "new tensor": lambda x, v: x * x.new_full((4,), v),
    "new tensor of integers": lambda x, v: x * torch.ones(3, dtype=torch.int64).new_full((4,), v * 4),
    "two numbers": lambda x, v: F.elu(F.dropout(x, v), v),
    "recomputed": lambda x, v: checkpoint(lambda y: F.dropout(y.sin(), v).cos(), x, use_reentrant=False),
    "computed": lambda x, v: F.dropout(x, 1 - v / 2),
}


class State:
    value = 0.0


def history(step, compiled, values=VALUES):
    """Returns (result, gradient) at each value."""
    found = []
    for number, value in enumerate(values):
        State.value = value
        torch.manual_seed(number)
        x = torch.randn(4, 4, requires_grad=True)
        found.append((compiled(x), x.grad))
    return found


def run(call, backend):
    def step(x):
        y = call(x, State.value)
        y.square().sum().backward()
        return y.detach()

    compiled = sidefx_train.compile(step, backend=backend, rng="eager")
    return history(step, step), history(step, compiled), compiled.report()


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.every(4)
def test_one_graph_for_all_values_with_the_bits_of_eager(name):
    want, have, report = run(STEPS[name], "eager")
    assert len(report.captures) == 2 and not report.fallbacks, str(report)
    for wanted, had in zip(want, have, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, had, strict=True))


FUSED = (
    *("dropout", "lerp", "huber", "norm", "elu", "hardtanh", "addmm", "attention", "normal", "momentum"),
    *("random slopes", "margin of classes", "normal numbers", "place among numbers", "place among integers", "bucket"),
    *("new tensor", "eps of a batch norm", "eps in evaluation", "eps of an instance norm", "eps of an rms norm"),
    *("celu", "deviation", "variance and mean", "correction", "spaced", "spaced by a factor", "tolerance"),
    *("times a logarithm", "times a logarithm of one more", "zeta", "polynomial", "among numbers"),
)


COMPILED = [(name, backend) for backend in ("aot_eager", "inductor") for name in FUSED]


@pytest.mark.parametrize(("name", "backend"), COMPILED)
@pytest.mark.every(8)
def test_compiled_code_reads_the_number(name, backend):
    want, have, report = run(STEPS[name], backend)
    assert len(report.captures) == 2 and not report.fallbacks, str(report)
    for wanted, had in zip(want, have, strict=True):
        for a, b in zip(wanted, had, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("power", [torch.Tensor.pow, torch.float_power], ids=lambda power: power.__name__)
def test_a_number_that_crosses_a_limit_is_captured_once_on_each_side(power):
    def step(x):
        y = power(x.abs(), State.value)
        y.sum().backward()
        return y.detach()

    values = (0.3, 0.4, 1.0, 1.5, 0.0, 0.7, 2.0, 2.5, 3.5, 1.7, -0.5)
    compiled = sidefx_train.compile(step, backend="eager")
    for wanted, had in zip(history(step, step, values), history(step, compiled, values), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, had, strict=True))
    assert len(compiled.report().captures) == 8, str(compiled.report())


def test_infinity_is_no_value_between_limits():
    def step(x):
        y = torch.linalg.vector_norm(x, State.value)
        y.backward()
        return y.detach()

    values = (3.0, 3.5, 4.0, math.inf, 5.0)
    compiled = sidefx_train.compile(step, backend="eager")
    for wanted, had in zip(history(step, step, values), history(step, compiled, values), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, had, strict=True))
    assert len(compiled.report().captures) == 3, str(compiled.report())


def test_second_derivatives():
    def step(x):
        y = F.huber_loss(x.lerp(x * x, State.value), x.detach() * 2, delta=State.value)
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        (y + grad.square().sum()).backward()
        return y.detach()

    compiled = sidefx_train.compile(step, backend="eager")
    for wanted, had in zip(history(step, step), history(step, compiled), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, had, strict=True))
    assert len(compiled.report().captures) == 2, str(compiled.report())


def test_the_error_of_an_invalid_number():
    def step(x):
        return F.dropout(x, State.value)

    compiled = sidefx_train.compile(step, backend="eager")
    for value in (0.3, 0.4, 0.5):
        State.value = value
        compiled(torch.ones(3))
    State.value = 1.5
    with pytest.raises(ValueError, match="between 0 and 1"):
        compiled(torch.ones(3))


def test_a_number_inside_a_new_tensor_is_not_a_probe():
    def step(x):
        return torch.tensor(State.value, dtype=torch.int32) + x, torch.lerp(
            torch.tensor(1.0), torch.tensor(3.0), State.value
        )

    compiled = sidefx_train.compile(step, backend="eager")
    for value in (5.5, 6.5, 7.5):
        State.value = value
        assert repr(compiled(torch.ones(2))) == repr(step(torch.ones(2)))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_muon_is_captured_whatever_its_learning_rate(backend):
    torch.manual_seed(0)
    first = torch.nn.Linear(8, 8, bias=False)
    weights = []
    for compiles in (False, True):
        model = copy.deepcopy(first)
        optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def step(x, model=model, optimizer=optimizer):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        run_step = sidefx_train.compile(step, backend=backend) if compiles else step
        for number in range(4):
            torch.manual_seed(number)
            run_step(torch.randn(4, 8))
            scheduler.step()
        weights.append(model.weight.detach())
    report = run_step.report()
    assert len(report.captures) == 1 and not report.fallbacks, str(report)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-2, atol=2e-3)  # it computes in bfloat16


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_number_that_is_zero_is_not_another_zero_of_the_graph(backend):
    """The constant that takes a number's place differs from every other constant, also where the number is 0."""

    def step(x):
        return torch.empty(4).normal_(0.0, std.value) * x + 0.0, F.dropout(x, std.p)

    std = SimpleNamespace(value=0.0, p=0.0)
    compiled = sidefx_train.compile(step, backend=backend, rng="eager")
    for value in (0.5, 0.0, 0.75, 0.5, 1.5):
        std.value, std.p = value, value / 2
        torch.manual_seed(0)
        want = step(torch.ones(4))
        torch.manual_seed(0)
        have = compiled(torch.ones(4))
        assert all(map(torch.equal, want, have)), value


@pytest.mark.parametrize("made", [torch.var, torch.std])
def test_integers_that_a_variance_corrects_by(made):
    """Also as many as there are elements, and more: the derivative decides on that."""

    def step(x):
        y = made(x, 1, correction=State.value) + made(x, correction=State.value)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return y.detach()

    values = [0, 1, 2, 3, 1, 0, 4, 2, 5, 16, 17]
    compiled = sidefx_train.compile(step, backend="eager")
    for wanted, had in zip(history(step, step, values), history(step, compiled, values), strict=True):
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(wanted, had, strict=True))
    report = compiled.report()
    assert len(report.captures) <= 6 and not report.fallbacks, str(report)


def test_a_second_derivative_of_a_number_in_single_precision():
    def step(x):
        y = F.celu(x, State.value)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return y.detach()

    compiled = sidefx_train.compile(step, backend="eager")
    for wanted, had in zip(history(step, step), history(step, compiled), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, had, strict=True))
    assert len(compiled.report().captures) == 2, str(compiled.report())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_multiplied_by_a_changing_number_as_it_is(dtype):
    """Half precision has 3 or 4 digits: a rate of 0.3 would be 0.3008 there, at every step."""

    def step(x):
        return x * State.value, x / State.value, torch.lerp(x, 2 * x, State.value)

    compiled = sidefx_train.compile(step, warmup="now")
    for value in (0.2, 0.3, 0.7, 0.001, 0.9999):
        State.value = value
        x = (torch.rand(512) + 1).to(dtype)
        assert all(map(torch.equal, compiled(x), step(x))), value
    report = compiled.report()
    assert len(report.captures) <= 2 and not report.fallbacks, str(report)


@pytest.mark.parametrize("method", [True, False])
def test_quarter_turns(method):
    """Turns by whole ones more are the same graph."""

    def step(x):
        State.value += 3
        turned = x.rot90(State.value, [1, 0]) if method else torch.rot90(x, k=State.value)
        (turned * 2).sum().backward()
        return turned.detach()

    def run(fn):
        State.value, found = -11, []
        for index in range(12):
            x = torch.arange(index, index + 9.0).view(3, 3).requires_grad_()
            found.append((fn(x), x.grad))
        return found

    compiled = sidefx_train.compile(step, backend="eager")
    for wanted, had in zip(run(step), run(compiled), strict=True):
        assert all(map(torch.equal, wanted, had))
    report = compiled.report()
    assert len(report.captures) == 4 and not report.fallbacks, str(report)
