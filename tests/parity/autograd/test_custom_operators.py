"""Operators with a derivative registered in Python: its reads are guarded, its effects happen at every call."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn

import sidefx_train

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")

LOG: list[str] = []
FACTOR = {"value": 1.0}
_NUMBERS = itertools.count()


def doubled():
    @torch.library.custom_op(f"sidefx_tests::double{next(_NUMBERS)}", mutates_args=())
    def double(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    double.register_fake(lambda x, scale=2.0: torch.empty_like(x))

    def set_up(ctx, inputs, output):
        LOG.append(f"set up {len(inputs)}")
        ctx.save_for_backward(inputs[0], output)
        ctx.scale = inputs[1]

    def backward(ctx, grad):
        LOG.append("backward")
        x, out = ctx.saved_tensors
        return grad * ctx.scale * FACTOR["value"] + 0 * x * out, None

    double.register_autograd(backward, setup_context=set_up)
    return double


def several():
    library = torch.library.Library(name := f"sidefx_tests{next(_NUMBERS)}", "DEF")
    library.define("pair(Tensor a, Tensor b, *, float scale=3.0) -> (Tensor, Tensor)")
    for kind in ("CPU", "Meta"):
        library.impl("pair", lambda a, b, scale=3.0: (a * b * scale, a + b), kind)

    def set_up(ctx, inputs, keyword_only_inputs, output):
        LOG.append(f"scale {keyword_only_inputs['scale']}")
        ctx.save_for_backward(*inputs)
        ctx.scale = keyword_only_inputs["scale"]

    def backward(ctx, first, second):
        LOG.append(f"needs {ctx.needs_input_grad[:2]}")
        a, b = ctx.saved_tensors
        return first * b * ctx.scale * FACTOR["value"] + second, first * a * ctx.scale + second

    torch.library.register_autograd(f"{name}::pair", backward, setup_context=set_up, lib=library)
    pair = getattr(torch.ops, name).pair
    pair.library = library  # its kernels are removed when it is freed
    return lambda x: sum(pair(x, x.sin(), scale=2.0)) + pair.default(x, b=x.detach())[0]


def compare(operator, split, backend="eager"):
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        LOG.clear()
        FACTOR["value"] = 1.0
        model, seen = nn.Linear(3, 2), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

        def forward(x, model=model):
            return operator(model(x)).square().mean()

        def step(x, optimizer=optimizer, forward=forward):
            loss = forward(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        if compiled and split:
            inner = sidefx_train.compile(forward, backend=backend)

            def call(x, step=step, inner=inner):
                return step(x, forward=inner)
        else:
            call = sidefx_train.compile(step, backend=backend) if compiled else step
        for i in range(5):
            FACTOR["value"] = 1.0 + i // 2
            seen.append(call(torch.ones(2, 3) * i))
        outcomes.append(([*seen, *(p.detach().clone() for p in model.parameters())], list(LOG)))
        report = None if not compiled else (inner if split else call).report()
    (want, said), (have, heard) = outcomes
    assert said == heard
    for a, b in zip(want, have, strict=True):
        assert torch.equal(a, b) if backend == "eager" else torch.allclose(a, b, atol=1e-6)
    return report


@pytest.mark.parametrize("make", [doubled, several])
@pytest.mark.parametrize("split", [False, True], ids=["whole step", "forward alone"])
def test_python_in_the_derivative(make, split):
    report = compare(make(), split)
    if not split:
        assert report.replays >= 2 and report.fallback_count == 0 and not report.breaks, str(report)


def test_under_inductor():
    compare(doubled(), split=False, backend="inductor")


def test_a_derivative_that_is_registered_later():
    operator = doubled()
    x, found = torch.ones(3, requires_grad=True), []

    def step(x):
        (grad,) = torch.autograd.grad(operator(x).sum(), x)
        return grad

    FACTOR["value"] = 1.0
    call = sidefx_train.compile(step, backend="eager")
    found += [call(x), call(x)]
    operator.register_autograd(lambda ctx, grad: (grad * 7, None))
    found += [call(x), step(x)]
    assert [float(grad[0]) for grad in found] == [2.0, 2.0, 7.0, 7.0]


def test_no_derivative_is_asked_for():
    operator = doubled()
    call = sidefx_train.compile(lambda x: operator(x).sum(), backend="eager", fullgraph=True)
    LOG.clear()
    assert float(call(torch.ones(3))) == 6.0
    with torch.no_grad():
        assert float(call(torch.ones(3, requires_grad=True))) == 6.0
    assert not LOG


def test_warnings_of_a_fake_kernel_are_not_shown():
    @torch.library.custom_op(f"sidefx_tests::warning{next(_NUMBERS)}", mutates_args=())
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @shifted.register_fake
    def _(x):
        warnings.warn("a fake kernel warns", FutureWarning)
        return torch.empty_like(x)

    step = sidefx_train.compile(lambda x: shifted(x) * 2, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert torch.equal(step(torch.ones(3)), torch.full((3,), 4.0))


def test_an_operator_that_is_asked_for_in_the_step():
    """Regression: ``torch.ops`` keeps it from then on, so that a guard on its namespace did not hold."""
    name = f"sidefx_tests{next(_NUMBERS)}"
    library = torch.library.Library(name, "DEF")
    library.define("sine(Tensor x) -> Tensor")
    for key in ("CPU", "Meta"):
        library.impl("sine", torch.sin, key)
    step = sidefx_train.compile(lambda x: getattr(torch.ops, name).sine(x), backend="eager", fullgraph=True)
    for i in range(2):
        assert torch.equal(step(torch.full((2,), float(i))), torch.full((2,), float(i)).sin())
    assert len(step.report().captures) == 1


def test_saved_tensors_of_an_outside_node():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x

    compiled = sidefx_train.compile(backward, backend="eager")
    Doubled.backward = staticmethod(compiled)
    x = torch.ones(3, requires_grad=True)
    Doubled.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert "reads saved_tensors of a node" in compiled.report().breaks[0].reason


def _custom_op(calls):
    @torch.library.custom_op(f"sidefx_tests::made{next(_NUMBERS)}", mutates_args=())
    def sine(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin()

    sine.register_autograd(lambda ctx, grad: grad * 2)
    x = torch.ones(2, requires_grad=True)
    sine(x).sum().backward()
    return x.grad


def _library(calls):
    library = torch.library.Library(name := f"sidefx_tests{next(_NUMBERS)}", "DEF")
    library.define("cosine(Tensor x) -> Tensor")
    library.impl("cosine", lambda x: calls.append(1) or x.cos(), "CPU")
    return getattr(torch.ops, name).cosine(torch.ones(2))


@pytest.mark.parametrize("step", [_custom_op, _library])
def test_operators_that_a_step_registers(step):
    """Regression: the dispatcher called a function of the capture, after it."""
    calls: list[int] = []
    expected = step(calls)
    compiled = sidefx_train.compile(step, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(calls), expected)
    assert calls == [1, 1, 1]


def test_an_operator_that_only_writes_out():
    with torch.library._scoped_library("only_writes", "FRAGMENT") as library:
        library.define("double(Tensor x, *, Tensor(a!) out) -> ()")
        library.impl("double", lambda x, *, out: (out.copy_(x * 2), None)[1], "CompositeExplicitAutograd")

        def step(x, out):
            torch.ops.only_writes.double(x, out=out)
            return out + 1

        compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
        out = torch.zeros(3)
        assert torch.equal(compiled(torch.ones(3), out), torch.full((3,), 3.0))
        assert torch.equal(out, torch.full((3,), 2.0))


def _implicit(library):
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", lambda x: LOG.append("kernel") or x * FACTOR["value"], "CompositeImplicitAutograd")


def _differentiated(library):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            LOG.append("backward")
            return grad * FACTOR["value"]

    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", lambda x: x * 2, "CompositeExplicitAutograd")
    library.impl("scaled", Scaled.apply, "Autograd")


def _in_transforms(library):
    @torch.library.custom_op(f"{library.ns}::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    scaled.register_fake(torch.empty_like)
    scaled.register_vmap(lambda info, dims, x: (LOG.append("rule") or x * FACTOR["value"], dims[0]))


@pytest.mark.parametrize("define", [_implicit, _differentiated, _in_transforms])
def test_python_that_the_dispatcher_calls(define):
    """Regression: what such a kernel read was a constant of the graph, and its effects happened once."""
    with torch.library._scoped_library(f"sidefx_tests{next(_NUMBERS)}", "FRAGMENT") as library:
        define(library)
        scaled = getattr(torch.ops, library.ns).scaled

        def step(x):
            loss = (torch.vmap(scaled)(x.detach()) * x if define is _in_transforms else scaled(x)).sum()
            loss.backward()
            return loss.detach(), x.grad.clone()

        outcomes = []
        for call in (step, sidefx_train.compile(step, backend="eager")):
            LOG.clear()
            x, found = torch.ones(2, 3, requires_grad=True), []
            for factor in (1.0, 1.0, 3.0):
                FACTOR["value"] = factor
                found += call(x)
            outcomes.append(([tensor.tolist() for tensor in found], list(LOG)))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("first", [0, 2], ids=["before the capture", "after it"])
@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel:UserWarning")
def test_a_replaced_kernel_of_torch(first, backend):
    """Regression: compiled code went on with torch's own kernel."""
    called: list[int] = []
    compiled = sidefx_train.compile(lambda x: torch.sin(x) * 2, backend=backend)
    x, cosine = torch.ones(3), torch.ones(3).cos() * 2
    for index in range(first):
        assert torch.allclose(compiled(x), torch.full((3,), 1.0).sin() * 2), index
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("sin", lambda x: called.append(1) or x.cos(), "CPU")
        for _ in range(2):
            assert torch.equal(compiled(x), cosine)
    assert len(called) == 2 and "aten::sin" in str(compiled.report().fallbacks)


@pytest.mark.parametrize("warmup", ["now", "background"])
def test_kernels_in_python_run_as_often_as_in_eager(warmup):
    """Regression: the comparison of the first run with the captured graph called them twice more, and refused one whose
    results change."""
    calls = itertools.count()

    @torch.library.custom_op(f"sidefx_tests::numbered{next(_NUMBERS)}", mutates_args={"total"})
    def numbered(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum())
        return x * 1.5 + next(calls)

    numbered.register_fake(lambda x, total: torch.empty_like(x))
    total = torch.zeros(())

    def step(x):
        return numbered((x.sin() * 3).exp(), total) + 1

    x = torch.linspace(0, 1, 5)
    want = [*(step(x) for _ in range(8)), total.clone()]
    total.zero_()
    calls = itertools.count()
    compiled, have = sidefx_train.compile(step, backend="inductor", warmup=warmup), []
    for _ in range(8):
        have.append(compiled(x))
        assert compiled.wait()
    for a, b in zip(want, [*have, total], strict=True):
        assert torch.allclose(a, b)
    report = compiled.report()
    assert next(calls) == 8 and report.replays >= 4 and report.captures[0].verification, str(report)
