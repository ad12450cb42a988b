"""Python with effects in a backward that runs outside: once per backward, in eager's order, with the current state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sidefx_train

LOG: list[object] = []


class Counter:
    count = 0
    scale = 1.0


class Scaled(torch.autograd.Function):
    """Saves an argument, an output and a value; its backward reads and changes its context."""

    @staticmethod
    def forward(ctx, x, factor, counter):
        ctx.factor, ctx.counter = factor, counter
        y, part = x * factor, x.sin()
        ctx.save_for_backward(x, y, part)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y, part = ctx.saved_tensors
        ctx.counter.count += 1
        LOG.append((ctx.factor, ctx.counter.count, ctx.needs_input_grad, grad.sum().item()))
        return grad * ctx.factor * ctx.counter.scale + y * 0.1 + x * part, None, None


class Several(torch.autograd.Function):
    """Several outputs, of which one has no gradient; undefined gradients stay ``None``."""

    @staticmethod
    def forward(ctx, x, w, label):
        product, total, positive = x * w, x + w, x > 0
        ctx.mark_non_differentiable(positive)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, product)
        ctx.label = label
        return product, total, positive, "text"

    @staticmethod
    def backward(ctx, product_grad, total_grad, positive_grad, text_grad):
        x, w, _ = ctx.saved_tensors
        LOG.append((ctx.label, product_grad is None, total_grad is None, positive_grad is None, text_grad is None))
        grad = torch.zeros_like(x)
        grad = grad if product_grad is None else grad + product_grad * w
        return (grad if total_grad is None else grad + total_grad), None, None


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x, name):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.label = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        LOG.append(ctx.label)
        return grad * output, None


class WrongCount(torch.autograd.Function):
    """Its backward raises in eager's words."""

    @staticmethod
    def forward(ctx, x, y):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, grad):
        LOG.append("none")
        return None, None


def logging_hooks(x, w, counter):
    t = x * w
    a, b = t.sin(), t.cos()
    a.register_hook(lambda g: LOG.append(("a", g.sum().item())))
    b.register_hook(lambda g: LOG.append(("b", g.sum().item())))
    t.register_hook(lambda g: (LOG.append(("t", g.sum().item())), g * 3)[1])
    a.register_hook(lambda g: (LOG.append("again"), g * 2)[1])
    return (a * b).exp() + t


def counting_hook(x, w, counter):
    h = x * w

    def hook(grad):
        counter.count += 1
        return grad * grad if counter.count % 2 else grad + grad

    h.register_hook(hook)
    h.register_hook(hook)
    return h.exp()


def reading_hook(x, w, counter):
    h = x * w
    shift = h.sin().detach()
    h.register_hook(lambda g: g * counter.scale + shift)
    return h.exp()


def removed_hook(x, w, counter):
    h = x * w
    handle = h.register_hook(lambda g: LOG.append("never"))
    h.register_hook(lambda g: LOG.append("once"))
    handle.remove()
    return h.exp()


def hook_on_a_view(x, w, counter):
    v = (x * w).t()
    v.register_hook(lambda g: LOG.append((g.shape, g.sum().item())))
    return (v[1:] @ x).exp()


def hook_on_a_view_whose_part_leaves(x, w, counter):
    v = (x * w).t()
    v.register_hook(lambda g: (LOG.append(g.sum().item()), g * 2)[1])
    return v[0]


def hook_on_a_view_of_an_input(x, w, counter):
    v = w.view(3, 1)
    v.register_hook(lambda g: (LOG.append(g.sum().item()), g * 2)[1])
    return v[1:]


def part_of_a_function(x, w, counter):
    return Scaled.apply(x * w, 2.0, counter)[0]


def hook_inside_and_outside(x, w, counter):
    h = x * w
    h.register_hook(lambda g: LOG.append(g.sum().item()))
    loss = h.exp()
    (grad,) = torch.autograd.grad(loss.sum(), w, retain_graph=True)
    return loss + grad


def raising_hook(x, w, counter):
    h = x * w

    def hook(grad):
        LOG.append("raises")
        raise ValueError("no gradient")

    h.register_hook(hook)
    return h.exp()


def functions_in_a_row(x, w, counter):
    return Scaled.apply(Scaled.apply(x * w, 2.0, counter).sin(), 3.0, counter).exp()


def function_of_an_input(x, w, counter):
    return (Scaled.apply(w, 2.0, counter) * x).exp()


def function_as_the_result(x, w, counter):
    return Scaled.apply(x * w, 2.0, counter)


def functions_that_share_arguments(x, w, counter):
    t = x * w
    u = t.sin()
    first = Scaled.apply(t, 2.0, counter)
    return first + u * Scaled.apply(t, 3.0, counter) * Scaled.apply(u, 4.0, counter) + t.cos()


def several_outputs(x, w, counter):
    product, total, positive, text = Several.apply(x * w, x + 1, "both")
    return product.sin() + total * positive


def one_of_several_outputs(x, w, counter):
    _, total, positive, text = Several.apply(x * w, x + 1, "one")
    return total * positive


def function_with_setup(x, w, counter):
    return WithSetup.apply(x * w, "setup") * 2


def function_without_gradient(x, w, counter):
    return NoGradient.apply(x * w, w * 2) + w


def wrong_count(x, w, counter):
    return WrongCount.apply(x * w, 1)


STEPS = [
    logging_hooks, counting_hook, reading_hook, removed_hook, hook_on_a_view, hook_on_a_view_whose_part_leaves,
    hook_on_a_view_of_an_input, part_of_a_function, hook_inside_and_outside, raising_hook,
    functions_in_a_row, function_of_an_input, function_as_the_result, functions_that_share_arguments, several_outputs,
    one_of_several_outputs, function_with_setup, function_without_gradient, wrong_count,
]  # fmt: skip


def history(run, backwards=1):
    LOG.clear()
    counter, found = Counter(), []
    for i in range(3):
        generator = torch.Generator().manual_seed(i)
        x, w = torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator).requires_grad_()
        result = run(x, w, counter)
        counter.scale += 1  # what runs later reads it
        found.append(result.detach())
        for _ in range(backwards):
            try:
                result.sum().backward(retain_graph=backwards > 1)
            except (ValueError, RuntimeError) as error:
                found.append(str(error))
        found += [w.grad, counter.count]
    return found, list(LOG)


def check(wanted, found):
    assert found[1] == wanted[1], f"{found[1]}, eager did {wanted[1]}"
    for want, have in zip(wanted[0], found[0], strict=True):
        equal = torch.equal(want, have) if isinstance(want, torch.Tensor) else want == have
        assert equal, f"{have}, eager has {want}"


@pytest.mark.parametrize("step", STEPS)
def test_effects_happen_when_the_backward_runs(step):
    captured = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise")
    check(history(step), history(captured))
    report = captured.report()
    assert report.replays == 3 and len(report.captures) == 1, str(report)


def test_a_retained_graph_runs_its_python_again():
    captured = sidefx_train.compile(functions_that_share_arguments, backend="eager", fullgraph=True, on_failure="raise")
    check(history(functions_that_share_arguments, 2), history(captured, 2))


def test_a_gradient_can_be_differentiated_again():
    def second(run):
        x, w = torch.arange(6.0).view(2, 3).cos(), torch.tensor([0.5, -0.3, 0.2], requires_grad=True)
        (grad,) = torch.autograd.grad(run(x, w, Counter()).sum(), w, create_graph=True)
        grad.sum().backward()
        return grad.detach(), w.grad

    captured = sidefx_train.compile(functions_in_a_row, backend="eager", fullgraph=True, on_failure="raise")
    for want, have in zip(second(functions_in_a_row), second(captured), strict=True):
        torch.testing.assert_close(have, want)


def test_the_context_is_the_programs():
    """Its attributes, its name, and the tensors that it saved are those of eager."""

    def described(run):
        w = torch.tensor([1.0, 2.0], requires_grad=True)
        counter = Counter()
        node = run(torch.ones(2), w, counter).grad_fn
        return type(node).__name__, node.factor, node.counter is counter, [t.tolist() for t in node.saved_tensors]

    captured = sidefx_train.compile(function_as_the_result, backend="eager", fullgraph=True, on_failure="raise")
    assert described(captured) == described(function_as_the_result)


def test_a_saved_tensor_that_was_changed_raises():
    captured = sidefx_train.compile(function_as_the_result, backend="eager", fullgraph=True, on_failure="raise")
    for run in (function_as_the_result, captured):
        result = run(torch.ones(2), torch.tensor([1.0, 2.0], requires_grad=True), Counter())
        with torch.no_grad():
            result.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_a_returned_handle_removes_the_hook():
    """Also of a hook that could be recorded: the handle decides at run time."""

    def step(x, w):
        h = x * w
        return h.exp(), h.register_hook(lambda grad: grad * 2)

    def results(run):
        found = []
        for i in range(4):
            w = torch.tensor([1.0, 2.0], requires_grad=True)
            result, handle = run(torch.ones(2) * i, w)
            if i % 2:
                handle.remove()
            result.sum().backward()
            found.append(w.grad.tolist())
        return found

    captured = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise")
    assert results(captured) == results(step) and captured.report().replays == 4


@pytest.mark.parametrize("kind", ["full", "full and pre", "of the model", "changing"])
def test_hooks_of_modules(kind):
    def trained(compiles):
        torch.manual_seed(0)
        model, log = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), []

        def seen(module, grads, result_grads):
            log.append([None if g is None else g.tolist() for g in (*grads, *result_grads)])

        layer = model if kind == "of the model" else model[1]
        layer.register_full_backward_hook(seen)
        if kind == "full and pre":
            layer.register_full_backward_pre_hook(lambda module, grads: log.append(grads[0].tolist()))
        if kind == "changing":
            model[2].register_full_backward_hook(lambda module, grads, result_grads: (grads[0] * len(log),))
        options = {"backend": "eager", "fullgraph": True, "on_failure": "raise"}
        run = sidefx_train.compile(model, **options) if compiles else model
        found = []
        for i in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i)).requires_grad_()
            run(x).pow(2).sum().backward()
            found += [x.grad.tolist(), *(parameter.grad.tolist() for parameter in model.parameters())]
        return found, log, run

    wanted, found = trained(False), trained(True)
    assert found[:2] == wanted[:2]
    assert found[2].report().replays == 3 and len(found[2].report().captures) == 1, str(found[2].report())


def test_under_inductor():
    captured = sidefx_train.compile(functions_that_share_arguments, fullgraph=True, on_failure="raise")
    wanted, found = history(functions_that_share_arguments), history(captured)
    assert [each[:3] for each in found[1]] == [each[:3] for each in wanted[1]]
    torch.testing.assert_close(found[0], wanted[0])


def returns_a_view(x):
    class Viewed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view(-1)

        @staticmethod
        def backward(ctx, grad):
            LOG.append("view")
            return grad.view(2, 3)

    return Viewed.apply(x * 2)


def changed_later(x):
    h = x * 2
    h.register_hook(lambda grad: LOG.append("before"))
    h.mul_(2)
    return h.exp()


def hooked_node(x):
    h = x.exp()
    h.grad_fn.register_hook(lambda grads, result_grads: LOG.append("node"))
    return h * 2


@pytest.mark.parametrize(
    ("step", "reason"), [(returns_a_view, "returns a view"), (changed_later, "has side effects"),
                         (hooked_node, "a hook on an autograd node")]
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
def test_what_is_left_to_eager(step, reason):
    def results(run):
        LOG.clear()
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        for _ in range(2):
            run(x).sum().backward()
        return x.grad.tolist(), list(LOG)

    captured = sidefx_train.compile(step, backend="eager")
    assert results(captured) == results(step)
    assert any(reason in record.reason for record in (*captured.report().breaks, *captured.report().fallbacks))
