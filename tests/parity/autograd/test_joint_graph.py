"""Results of a captured function with a live autograd graph: forward and backward joined outside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.parity.graph_breaks.test_breaks import outside
from tests.support.parity import Program, batches, mlp, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")

BACKENDS = ["eager", "aot_eager", "inductor"]


def compare(make, inputs, backend="eager", steps=3, whole=True, exact=None):
    """Runs ``make() -> (module or function, parameters)`` eagerly and compiled: values and gradients for each input.

    ``inputs(i)`` returns the arguments of call ``i``; those that require grad are compared too.
    """
    exact = backend != "inductor" if exact is None else exact
    strict = {"fullgraph": True, "on_failure": "raise"} if whole else {}
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        fn, parameters = make()
        call = sidefx_train.compile(fn, backend=backend, **strict) if compiled else fn
        seen = []
        for i in range(steps):
            args = inputs(i)
            torch.manual_seed(100 + i)
            out = call(*args)
            flat = [t for t in (out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else (out,))]
            loss = sum((t * torch.linspace(0.5, 2, t.numel()).view(t.shape)).sum() for t in flat if t.requires_grad)
            for p in parameters:
                p.grad = None
            loss.backward()
            grads = [p.grad for p in parameters] + [a.grad for a in args if isinstance(a, torch.Tensor) and a.is_leaf]
            seen.append(([t.detach().clone() for t in flat], [t.requires_grad for t in flat], copy.deepcopy(grads)))
            with torch.no_grad():
                for p in parameters:
                    if p.grad is not None:
                        p -= 0.1 * p.grad
        outcomes.append(seen)
        report = call.report() if compiled else None
    for i, (want, have) in enumerate(zip(*outcomes, strict=True)):
        assert want[1] == have[1], f"call {i}: requires_grad {have[1]}, eager {want[1]}"
        for kind, a, b in (("value", want[0], have[0]), ("gradient", want[2], have[2])):
            for k, (x, y) in enumerate(zip(a, b, strict=True)):
                assert (x is None) == (y is None), f"call {i}: {kind} {k}: {x} and {y}"
                if x is not None:
                    assert x.shape == y.shape and x.stride() == y.stride(), f"call {i}: {kind} {k}: layout"
                    if not exact:
                        assert (x - y).norm() <= 1e-5 * max(1.0, x.norm()), f"call {i}: {kind} {k}: {x} and {y}"
                    else:
                        assert torch.equal(x, y), f"call {i}: {kind} {k}: {x} and {y}"
    if whole:
        assert report.fallback_count == 0 and report.graph_count == 1, str(report)
    return report


def data(*shape, grad=False):
    def inputs(i):
        return (torch.randn(*shape, generator=torch.Generator().manual_seed(i)).requires_grad_(grad),)

    return inputs


def module(build):
    def make():
        made = build()
        return made, list(made.parameters())

    return make


MODELS = {
    "mlp with batch norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, dropout=0.0),
    "frozen layer": lambda: nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 2)),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MODELS)
def test_models_alone(name, backend):
    shape = (4, 5, 6) if name == "attention" else (5, 6)
    compare(module(MODELS[name]), data(*shape, grad=True), backend)


def test_model_alone_under_inductor():
    compare(module(MODELS["mlp with batch norm"]), data(5, 6, grad=True), "inductor")


def test_training_loop_around_a_compiled_model():
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            return loss, loss.detach()

        def whole(x, y):
            optimizer.zero_grad()
            loss, shown = made.step(x, y)
            loss.backward()
            optimizer.step()
            return shown

        made = Program(step, batches((5, 6), classes=3), (model, optimizer))
        return made

    torch.manual_seed(0)
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        program = make()
        step = sidefx_train.compile(program.step, backend="eager", fullgraph=True) if compiled else program.step
        model, optimizer = program.watch
        seen = []
        for i in range(10):
            optimizer.zero_grad()
            loss, shown = step(*program.batch(i))
            loss.backward()
            optimizer.step()
            seen.append(shown)
        results.append((seen, [p.detach().clone() for p in model.parameters()]))
    for a, b in zip(*results, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def function(fn):
    def make():
        weight = nn.Parameter(torch.randn(6, 6))
        return (lambda x: fn(x, weight)), [weight]

    return make


class Doubling(torch.autograd.Function):
    """Its backward is not the derivative of its forward, to show which one is used."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 + x * 0


def _partly_without_grad(x, w):
    with torch.no_grad():
        scale = (x @ w).abs().mean()
    return (x @ w) * scale


FUNCTIONS = {
    "several outputs": lambda x, w: ((x @ w).relu(), (x * 2).sum(), x.detach() + 1),
    "dict": lambda x, w: {"a": x @ w, "b": (x @ w.t()).sum(0)},
    "detached twin": lambda x, w: ((x @ w).sum(), (x @ w).sum().detach()),
    "no_grad inside": _partly_without_grad,
    "in-place on an intermediate": lambda x, w: (x @ w).mul_(2).add_(1).relu_(),
    "custom function": lambda x, w: Doubling.apply(x @ w) + x,
    "a transposed result": lambda x, w: (x @ w).t(),
    "input unused": lambda x, w: w.sum() * torch.ones(2),
    "a result that does not depend on parameters": lambda x, w: (x * 2, w.detach().sum()),
    "checkpoint": lambda x, w: torch.utils.checkpoint.checkpoint(lambda a: torch.sin(a @ w), x, use_reentrant=False),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, backend):
    # A backward is traced for a tangent with the layout of its output; eager here gets a contiguous one.
    compare(function(FUNCTIONS[name]), data(5, 6, grad=True), backend, exact=name != "a transposed result")


def test_input_with_a_graph_from_outside():
    """Gradients flow through the captured function into the caller's earlier computation."""

    def make():
        first, second = nn.Linear(6, 6), nn.Linear(6, 2)
        inner = sidefx_train.compile(second, backend="eager", fullgraph=True) if make.compiled else second
        return first, inner, [*first.parameters(), *second.parameters()]

    results = []
    for make.compiled in (False, True):
        torch.manual_seed(0)
        first, second, parameters = make()
        for i in range(3):
            x = data(5, 6)(i)[0]
            second(first(x).relu()).square().sum().backward()
        results.append([p.grad.clone() for p in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_undefined_and_oddly_laid_out_tangents():
    def run(compiled):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(6, 6))
        fn = lambda x: (x @ w, (x * w[0]).sum(1))  # noqa: E731
        call = sidefx_train.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn
        grads = []
        for tangent in (torch.ones(6, 5).t(), torch.ones(1, 6).expand(5, 6)):
            w.grad = None
            first, _ = call(data(5, 6)(1)[0])
            first.backward(tangent)
            grads.append(w.grad.clone())
        return grads

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_backward_twice_and_through_the_gradient():
    w = nn.Parameter(torch.randn(6, 6))
    call = sidefx_train.compile(lambda x: (x @ w).sin().sum(), backend="eager", fullgraph=True)
    x = data(5, 6)(1)[0]
    out = call(x)
    out.backward(retain_graph=True)
    once = w.grad.clone()
    out.backward()
    assert torch.equal(w.grad, once + once)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()
    out = call(x)
    (gradient,) = torch.autograd.grad(out, w, create_graph=True)
    w.grad = None
    gradient.sum().backward()
    (expected,) = torch.autograd.grad((x @ w).sin().sum(), w, create_graph=True)
    assert torch.allclose(w.grad, torch.autograd.grad(expected.sum(), w)[0])


def test_outputs_without_anything_in_common_are_differentiated_apart():
    def two(x, y):
        return (x * x.sin()).sum(), (y * y.cos()).sum()

    call = sidefx_train.compile(two, backend="aot_eager", fullgraph=True, on_failure="raise")
    for _ in range(2):
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        first, second = call(x, y)
        first.backward()
        assert y.grad is None, "the second output has not been differentiated yet"
        second.backward()
        for given, fn in ((x, torch.sin), (y, torch.cos)):
            twin = given.detach().clone().requires_grad_()
            (twin * fn(twin)).sum().backward()
            assert torch.equal(given.grad, twin.grad)


def test_changing_what_backward_needs_is_noticed():
    for compiled in (False, True):
        w = nn.Parameter(torch.randn(6, 6))
        fn = lambda x: (x @ w).sin()  # noqa: E731
        call = sidefx_train.compile(fn, backend="eager", fullgraph=True) if compiled else fn
        out = call(data(5, 6, grad=True)(1)[0])
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        y = (
            (lambda x: (x @ w).exp())
            if not compiled
            else sidefx_train.compile(lambda x: (x @ w).exp(), backend="eager")
        )
        made = y(data(5, 6, grad=True)(1)[0])
        with torch.no_grad():
            made.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()


VIEWS = {
    "of one another": lambda x, w: (lambda y: (y, y.view(-1), y[1:3]))(x @ w),
    "of what nothing else refers to": lambda x, w: (lambda y: (y[0], y.t()))(x @ w),
    "of a parameter": lambda x, w: (w.t(), (x @ w).sum()),
    "of an input and of a view": lambda x, w: (x.view(6, 5).t()[1], x @ w),
    "detached": lambda x, w: (lambda y: (y, y.detach()[0], y.view(-1).detach()))(x @ w),
    "several at once": lambda x, w: (*(x @ w).split(2), *w.unbind()),
    "complex": lambda x, w: (torch.view_as_real(torch.fft.fft(x @ w)), torch.fft.fft(x @ w).imag),
    "written through a view": lambda x, w: (lambda y: (y[0].mul_(2), y)[1:])(x @ w),
    "turned in place": lambda x, w: ((x @ w).view(-1, 2).t_(), (x @ w).clone().unsqueeze_(0)),
}


def facts(outs, given):
    """Returns the facts that later operations on the outputs would see: bases, memory, versions, history."""
    base = [next((i for i, t in enumerate((*outs, *given)) if t is out._base), out._base is not None) for out in outs]
    memory = [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in (*outs, *given)] for a in outs]
    names = [out.grad_fn.name() if out._is_view() and out.grad_fn is not None else None for out in outs]
    return base, memory, names, [(out.stride(), out.storage_offset(), out._version, out.requires_grad) for out in outs]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VIEWS)
def test_views_that_leave(name, backend):
    seen = []
    for compiled in (False, True):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(6, 6))
        fn = lambda x: VIEWS[name](x, w)  # noqa: E731
        call = sidefx_train.compile(fn, backend=backend, fullgraph=True, on_failure="raise") if compiled else fn
        for i in range(2):
            x = data(5, 6, grad=True)(i)[0]
            outs = call(x)
            seen.append(facts(outs, (x, w)))
    assert seen[:2] == seen[2:]
    # Gradients of several views are added in another layout than eager's, and a matrix product then rounds differently.
    compare(function(VIEWS[name]), data(5, 6, grad=True), backend, exact=False)


def test_in_place_changes_of_views_that_left():
    def run(compiled):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(6, 6))
        fn = lambda x: (lambda y: (y, y[0], y.detach()[1], w.t()))(x @ w)  # noqa: E731
        call = sidefx_train.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn
        y, row, twin, turned = call(data(5, 6)(1)[0])
        row.mul_(2)
        twin.zero_()
        said = []
        for change in (lambda: turned.add_(1), lambda: y.split(2)[0].add_(1), lambda: y.backward(torch.ones_like(y))):
            try:
                change()
            except RuntimeError as error:
                said.append(str(error).replace("_CapturedPartBackward", "MmBackward0"))
        return y.detach(), row.detach(), w.grad, y._version, row._version, said

    for want, have in zip(run(False), run(True), strict=True):
        assert torch.equal(want, have) if isinstance(want, torch.Tensor) else want == have


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_view_made_by_a_custom_function_is_not_replayed(backend):
    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.t()

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad.t()

    for fn in (lambda x, w: Turned.apply(x @ w), lambda x, w: Turned.apply(w)[0]):
        compare(function(fn), data(5, 6, grad=True), backend, whole=False, exact=False)


def test_hooks_on_intermediates_run_when_backward_runs():
    seen = []

    def fn(x, w):
        y = x @ w
        y.register_hook(lambda g: (seen.append(g.sum().item()), g * 2)[1])
        return y.sum()

    compare(function(fn), data(5, 6), whole=False)
    assert len(seen) == 6 and seen[:3] == seen[3:]


@pytest.mark.parametrize("when", ["before", "between", "after_a_call"])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_on_leaves_run_once(when, late):
    """The engine calls the captured backward and runs the hooks once, whenever they were registered."""

    def make(backend):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        seen = []

        def register():
            if late:
                model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
            else:
                model.weight.register_hook(lambda g: (seen.append(g.sum().item()), g * 0.5)[1])

        def loss(x):
            return model(x).pow(2).mean()

        step = loss if backend is None else sidefx_train.compile(loss, backend=backend)
        if when == "before":
            register()
        for index in range(4):
            value = step(torch.ones(4, 3))
            if index == 1 and when != "before":
                register()
                if when == "after_a_call":
                    value = step(torch.ones(4, 3))
            value.backward()
        return seen, model.weight.grad

    eager, captured = make(None), make("eager")
    assert captured[0] == eager[0], f"hooks saw {captured[0]}, eager's {eager[0]}"
    assert torch.equal(captured[1], eager[1])


def test_grad_mode_decides():
    model = mlp()
    call = sidefx_train.compile(model, backend="eager", fullgraph=True)
    x = data(5, 6)(0)[0]
    assert call(x).requires_grad
    with torch.no_grad():
        assert not call(x).requires_grad
    assert call(x).requires_grad
    model.requires_grad_(False)
    assert not call(x).requires_grad
    assert torch.equal(call(x), model(x))


def test_leaf_or_not_is_looked_at():
    """A step that ran backward into a leaf must not be replayed for an input with a history."""

    def step(x):
        (x * 3).sum().backward()

    call = sidefx_train.compile(step, backend="eager")
    leaf = torch.ones(3, requires_grad=True)
    call(leaf)
    assert torch.equal(leaf.grad, torch.full((3,), 3.0))
    base = torch.ones(3, requires_grad=True)
    call(base * 2)
    assert torch.equal(base.grad, torch.full((3,), 6.0))


# --- breaks before backward --------------------------------------------------------------------------------------


def broken_step(forward):
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        log: list[object] = []

        def step(x, y):
            log.append("start")
            loss = forward(model, x, y, log)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.append("end")
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer, log))

    return make


def _break_on_loss(model, x, y, log):
    loss = F.cross_entropy(model(x), y)
    if loss > 1.05:
        log.append("high")
        loss = loss * 2
    return loss


def _break_in_the_middle(model, x, y, log):
    hidden = model[0](x)
    log.append(outside(hidden.sum()))
    for layer in list(model)[1:]:
        hidden = layer(hidden)
    return F.cross_entropy(hidden, y)


@pytest.mark.parametrize("forward", [_break_on_loss, _break_in_the_middle])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_autograd_flows_through_breaks(forward, backend):
    report = parity(broken_step(forward), whole=False, captures=None, backend=backend)
    assert report.breaks and report.fallback_count == 0, str(report)
    for part in report.parts:
        assert part.fallback_count == 0, str(part)
    assert report.graph_count >= 3, str(report)


def test_autograd_flows_through_breaks_under_inductor():
    report = parity(broken_step(_break_in_the_middle), whole=False, captures=None, backend="inductor", steps=4)
    assert report.breaks and report.fallback_count == 0, str(report)


def test_a_detached_twin_shares_memory_and_version():
    w = nn.Parameter(torch.randn(6, 6))

    def fn(x):
        loss = (x @ w).sin()
        return loss, loss.detach()

    for call in (fn, sidefx_train.compile(fn, backend="eager", fullgraph=True)):
        out, twin = call(data(5, 6)(1)[0])
        assert out.data_ptr() == twin.data_ptr() and not twin.requires_grad
        before = out._version
        twin.zero_()
        assert out._version == before + 1 and out.abs().sum() == 0


def test_what_an_unused_output_depends_on_gets_no_gradient():
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    fn = lambda x: ((x * first).sum(), (x * second).sum(), (first * second).sum())  # noqa: E731
    for call in (fn, sidefx_train.compile(fn, backend="aot_eager", fullgraph=True)):
        first.grad = second.grad = None
        a, _, c = call(torch.arange(3.0))
        a.backward(retain_graph=True)
        assert second.grad is None and first.grad.tolist() == [0, 1, 2]
        c.backward()
        assert second.grad.tolist() == [1, 1, 1] and first.grad.tolist() == [1, 2, 3]


def _watched(hidden, loss, how):
    seen = []
    if how == "hook":
        hidden.register_hook(lambda grad: seen.append(grad) or grad * 2)
    elif how == "retain_grad":
        hidden.retain_grad()
        seen.append(hidden)
    elif how == "grad":
        seen.append(torch.autograd.grad(loss, hidden, retain_graph=True)[0])
    return seen


def _hidden_and_loss(model, x):
    hidden = model(x)
    return hidden, hidden.pow(2).mean()


def _tied(model, x):
    hidden = model(x)
    return hidden, hidden.pow(2).mean() + model.weight.norm()


def _three_levels(model, x):
    first, second = model(x).chunk(2, 1)
    third = first * 2 + second.exp()
    return first, (third + model.bias[0]).sum(), third, second


def _views_of_views(model, x):
    hidden = model(x)
    turned = hidden.t()
    row = turned[0].exp_() if hidden.shape[0] > 10 else turned[0]
    return row, row.sigmoid().sum() + hidden.mean() + turned.pow(2).sum(), turned, hidden


def _view_and_loss(model, x):
    logits = model(x)[:, 0]
    return logits, logits.pow(2).mean()


@pytest.mark.parametrize("how", ["hook", "retain_grad", "grad", "nobody"])
@pytest.mark.parametrize("forward", [_hidden_and_loss, _tied, _three_levels, _views_of_views, _view_and_loss])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_between_two_outputs(how, forward, backend):
    """A gradient from one output to another passes through the tensor in between, where a hook may observe it."""

    def results(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        run = sidefx_train.compile(forward, backend=backend, fullgraph=True) if compiled else forward
        hidden, loss, *others = run(model, torch.ones(4, 3))
        seen = [*_watched(hidden, loss, how), *(tensor for other in others for tensor in _watched(other, loss, how))]
        (loss + hidden.sum()).backward()
        seen = [tensor.grad if tensor.requires_grad else tensor for tensor in seen]
        return [model.weight.grad, model.bias.grad, *seen]

    assert all(torch.equal(a, b) for a, b in zip(results(True), results(False), strict=True))


def test_gradients_between_two_outputs_under_inductor():
    def results(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        run = sidefx_train.compile(_three_levels, fullgraph=True) if compiled else _three_levels
        first, loss, third, second = run(model, torch.ones(4, 3))
        for tensor in (first, third, second):
            tensor.retain_grad()
        third.register_hook(lambda grad: grad * 3)
        loss.backward()
        return [model.weight.grad, model.bias.grad, first.grad, second.grad, third.grad]

    torch.testing.assert_close(results(True), results(False))


def _retained(x, w, kept):
    hidden = x * w
    hidden.retain_grad()
    hidden.sum().backward()
    kept.append(hidden)


def _retained_and_alive(x, w, kept):
    hidden = x * w
    hidden.retain_grad()
    (hidden * 2).sum().backward(retain_graph=True)
    kept.append(hidden)


def _to_be_retained(x, w, kept):
    hidden = x * w
    hidden.retain_grad()
    kept += [hidden, hidden.exp()]


def _new_leaf(x, w, kept):
    leaf = torch.ones(3, requires_grad=True)
    (leaf * x * w).sum().backward()
    kept += [leaf, leaf.grad]


@pytest.mark.parametrize("step", [_retained, _retained_and_alive, _to_be_retained, _new_leaf])
def test_tensors_leave_with_their_gradients(step):
    def states(compiled):
        w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        run = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise") if compiled else step
        found = []
        for _ in range(3):
            kept: list[torch.Tensor] = []
            run(torch.full((3,), 0.5), w, kept)
            if step is _to_be_retained:
                kept[1].sum().backward()
            found.append([(t.retains_grad, t.grad, len(kept) > 1 and kept[0].grad is kept[1]) for t in kept])
        return found

    assert str(states(True)) == str(states(False))


def _hook_behind_a_break(x, w, log):
    hidden = x * w
    loss = (hidden * hidden).sum()
    if x.sum() > 100:
        log.append("high")
    hidden.register_hook(lambda grad: log.append(grad.sum().item()) or grad * 2)
    loss.backward()


def _retained_behind_a_break(x, w, log):
    hidden = x * w
    if x.sum() > 100:
        log.append("high")
    hidden.retain_grad()
    log.append(hidden.retains_grad)
    (hidden * hidden).sum().backward()
    log.append(hidden.grad.tolist())


def _retained_before_a_break(x, w, log):
    hidden = x * w
    hidden.retain_grad()
    (hidden * hidden).sum().backward()
    if x.sum() > 100:
        log.append("high")
    log.append(hidden.grad.tolist())
    hidden.grad = None
    if x.sum() > 101:
        log.append("higher")
    log.append(hidden.grad)


def _hook_removed_behind_a_break(x, w, log):
    hidden = x * w
    if x.sum() > 100:
        log.append("high")
    handle = hidden.register_hook(lambda grad: log.append("never") or grad * 2)
    loss = (hidden * hidden).sum()
    handle.remove()
    loss.backward()


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize(
    "step",
    [_hook_behind_a_break, _retained_behind_a_break, _retained_before_a_break, _hook_removed_behind_a_break],
)
def test_watching_gradients_across_breaks(step):
    def states(compiled):
        w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        run = sidefx_train.compile(step, backend="eager") if compiled else step
        log: list[object] = []
        for value in (0.5, 0.25, 50.0):
            w.grad = None
            run(torch.full((3,), value), w, log)
            log.append(w.grad.tolist())
        if compiled:
            assert run.report().replays == 3, run.report()
        return log

    assert states(True) == states(False)


def test_numbers_of_the_data_that_leave_and_that_the_backward_needs():
    class Picked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            few, many = (x > 0.5).nonzero().shape[0], (x > 0).nonzero().shape[0]
            picked = x[x > 0].unsqueeze(1) * self.weight
            return picked.mean(0).expand(many, 3).reshape(-1) * few, few + 1

    model, found, wanted = Picked(), [], []
    compiled = sidefx_train.compile(model, backend="aot_eager")
    for run, results in ((model, wanted), (compiled, found)):
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            output, number = run(torch.randn(8, generator=generator))
            output.sum().backward()
            results.append((output.tolist(), number, model.weight.grad.tolist()))
            model.weight.grad = None
    assert found == wanted
    assert compiled.report().replays == 3, str(compiled.report())
