"""``torch.cond`` and ``while_loop`` in a captured step: operators of the graph over captured branches."""

from __future__ import annotations

import types
import warnings

import pytest
import torch
from torch import nn
from torch._higher_order_ops import scan
from torch.nn import functional as F

import sidefx_train
from sidefx_train.errors import GraphBreakError
from sidefx_train.torch_compat import map_function, while_loop
from tests.support.parity import Program, batches, mlp, parity
from tests.support.training_steps import trained


def plain(step, *watch) -> Program:
    return Program(step, batches((5, 6), classes=3), watch)


def test_forward():
    def step(x, y):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: (x * 2).add_(1).relu_(), (x,))

    parity(lambda: plain(step), steps=5)


def test_nested_results():
    def step(x, y):
        return torch.cond(
            x.sum() > 0,
            lambda x: {"a": x.sin(), "b": (x.cos(), x * 2)},
            lambda x: {"a": x.cos(), "b": (x.sin(), x * 3)},
            (x,),
        )

    parity(lambda: plain(step), steps=5)


def by_layers(model, x, y):
    """The branches get parameters as operands and as closure variables; one branch ignores a layer."""
    hidden = model[0](x)
    hidden = torch.cond(hidden.sum() > 0, lambda h: model[1](h), lambda h: (h + model[1].bias).tanh(), (hidden,))
    return F.cross_entropy(hidden * hidden.detach().sigmoid(), y)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_training(backend):
    def make() -> Program:
        return trained(by_layers, nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)))

    parity(make, steps=5, backend=backend)


@pytest.mark.slow
def test_training_inductor():
    def make() -> Program:
        return trained(by_layers, nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)))

    parity(make, steps=5, backend="inductor")


def test_constants():
    def step(x, y):
        return torch.cond(x.sum() > 0, lambda x: x * torch.tensor(2.0), lambda x: x + torch.tensor([0.5] * 6), (x,))

    parity(lambda: plain(step), steps=5)


def test_number_decides():
    """A Python condition takes one branch, as in eager."""

    def step(x, y):
        return torch.cond(x.shape[0] > 3, lambda x: x.sin(), lambda x: x.cos(), (x,))

    parity(lambda: plain(step), steps=2)


def effects(true_word: str, false_word: str):
    """Returns a step whose branches append a word, and the same step with a Python branch, which matches eager."""
    log: list[str] = []

    def on_true(x):
        log.append(true_word)
        return x.sin()

    def on_false(x):
        log.append(false_word)
        return x.cos()

    def step(x):
        return torch.cond(x.sum() > 0, on_true, on_false, (x,))

    def eager(x):
        return on_true(x) if x.sum() > 0 else on_false(x)

    return step, eager, log


def test_equal_side_effects_are_kept():
    step, eager, log = effects("taken", "taken")
    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for sign in (1.0, -1.0, 1.0):
        x = torch.full((3,), sign)
        assert torch.equal(compiled(x), eager(x))
    assert log == ["taken"] * 6


def test_different_side_effects_are_refused():
    step, _, log = effects("true", "false")
    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    with pytest.raises(sidefx_train.errors.GraphBreakError) as refusal:
        compiled(torch.ones(3))
    assert refusal.value.code == "SFX111"
    assert "the branches of torch.cond leave different side effects" in str(refusal.value)
    assert "'true'" in str(refusal.value) and "'false'" in str(refusal.value) and "log" in str(refusal.value)
    assert log == []


def double(x):
    return x * 2


class Odd(torch.autograd.Function):
    """Its backward is not the derivative of its operations."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 7


def without_grad(h):
    with torch.no_grad():
        scale = h.sum()
    return h * scale


def hooked(h):
    h = h * 2
    h.register_hook(lambda grad: grad * 3)
    return h


def written(h):
    with torch.no_grad():
        BUFFER.add_(1)
    return h * BUFFER


BUFFER = torch.zeros(3)
WORDS = "a branch of torch.cond changes grad mode, or has its own backward"
TRUE = "the true branch of torch.cond"
REFUSED = [
    (Odd.apply, WORDS),
    (without_grad, WORDS),
    (hooked, "a branch of torch.cond registers a hook"),
    (written, f"{TRUE} writes in place to a tensor from outside"),
    (lambda h: F.dropout(h), f"{TRUE} draws random numbers"),
    (lambda h: h * h.sum().item(), f"{TRUE} computes a number"),
    (lambda h: 1, f"{TRUE} returns a int, not tensors"),
    (lambda h: (h * 2,), "the branches of torch.cond return differently nested tensors"),
]


@pytest.mark.parametrize(("branch", "words"), REFUSED, ids=range(len(REFUSED)))
def test_refused(branch, words):
    """Branches that the operator cannot represent stop the capture, with the reason."""
    model = mlp()

    def step(x):
        hidden = model(x)
        return torch.cond(hidden.sum() > 0, branch, double, (hidden,)).sum().backward()

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    with pytest.raises(sidefx_train.errors.GraphBreakError) as refusal:
        compiled(torch.ones(5, 6))
    assert refusal.value.reason == words
    assert all(p.grad is None for p in model.parameters())


# ---------------------------------------------------------------------- loops
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_while_loop(backend):
    weight = torch.full((6,), 1.5)

    def step(x, y):
        goes_on = lambda i, h: (i < 6) & (h.abs().sum() < 300)
        return while_loop(goes_on, lambda i, h: (i + 1, h * weight + x), (torch.tensor(0), x))

    parity(lambda: plain(step, weight), steps=4, backend=backend)


def test_while_loop_with_side_effects_is_refused():
    log: list[int] = []

    def body(i):
        log.append(1)
        return (i + 1,)

    compiled = sidefx_train.compile(lambda x: while_loop(lambda i: i < 3, body, (x,)), backend="eager", fullgraph=True)
    with pytest.raises(sidefx_train.errors.GraphBreakError) as refusal:
        compiled(torch.tensor(0))
    assert refusal.value.reason.startswith(
        "the body of while_loop has side effects, for an unknown number of iterations"
    )
    assert log == []


def test_while_loop_under_autograd_is_refused():
    def step(x):
        return while_loop(lambda h: h.sum() < 5, lambda h: (h + 1,), (x,))[0].sum().backward()

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    with pytest.raises(sidefx_train.errors.GraphBreakError) as refusal:
        compiled(torch.zeros(2, requires_grad=True))
    assert refusal.value.reason == "autograd through while_loop; put it under torch.no_grad()"


# ---------------------------------------------------------------------- branches of branches
def by_two_signs(model, x, y):
    """The false branch branches again; each innermost function uses another parameter."""
    hidden = model[0](x)

    def negative(h):
        return torch.cond(h.mean() < -0.05, lambda h: h * model[1].bias, lambda h: model[1](h), (h,))

    hidden = torch.cond(hidden.sum() > 0, lambda h: h.sin(), negative, (hidden,))
    return F.cross_entropy(hidden, y)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.every(2)
def test_nested_branches(backend):
    def make() -> Program:
        return trained(by_two_signs, nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)))

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        parity(make, steps=8, backend=backend)
    assert not [str(each.message) for each in shown if issubclass(each.category, UserWarning)]


def test_nested_branches_take_every_way():
    def step(x, y):
        inner = lambda x: torch.cond(y, lambda x: x.cos(), lambda x: (x * 3, x)[0], (x,))
        return torch.cond(x.sum() > 0, inner, lambda x: torch.cond(y, lambda x: x.sin(), lambda x: x - 1, (x,)), (x,))

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for sign in (1.0, -1.0):
        for flag in (True, False):
            x = torch.full((3,), sign)
            wanted = ((x.cos() if flag else x * 3) if sign > 0 else (x.sin() if flag else x - 1)).clone()
            assert torch.equal(compiled(x, torch.tensor(flag)), wanted)
    assert sidefx_train.explain(compiled).captures and len(sidefx_train.explain(compiled).captures) == 1


# ---------------------------------------------------------------------- the operator of torch.cond
OPERATOR = torch.ops.higher_order.cond


def test_operator():
    """Called with functions, it is torch's own kernel in eager: one function is called."""

    def step(x, y):
        chosen = OPERATOR(x.sum() > 0, lambda a, b: (a.sin(), a * b), lambda a, b: (a.cos(), a - b), (x, x + 1))
        return chosen, OPERATOR(pred=x.mean() > 0, true_fn=torch.sin, false_fn=torch.cos, operands=[x])

    parity(lambda: plain(step), steps=5)


def test_operator_differentiates_operands():
    def loss(model, x, y):
        hidden = model(x)
        hidden = OPERATOR(hidden.sum() > 0, lambda h, w: (h * w,), lambda h, w: (h - w,), (hidden, model[-1].bias))[0]
        return F.cross_entropy(hidden, y)

    parity(lambda: trained(loss, mlp()), steps=5)


WEIGHT = torch.ones(3, requires_grad=True)
CLOSES = "the cond operator differentiates results that are no tuple, a tensor of a closure, or not every operand"
OPERATOR_REFUSED = [
    (lambda h: h.view(-1), "a branch of the cond operator returns an alias"),
    (lambda h: h * WEIGHT, CLOSES),
    (lambda h: [h * 2], "the branches of torch.cond return differently nested tensors"),
]


@pytest.mark.parametrize(("branch", "words"), OPERATOR_REFUSED, ids=range(len(OPERATOR_REFUSED)))
def test_operator_refused(branch, words):
    compiled = sidefx_train.compile(
        lambda x: OPERATOR(x.sum() > 0, branch, double, (x,)), backend="eager", fullgraph=True
    )
    with pytest.raises(sidefx_train.errors.GraphBreakError) as refusal:
        compiled(torch.ones(3))
    assert refusal.value.reason == words


# ---------------------------------------------------------------------- map
def test_map():
    """The function is called for every slice; results are stacked."""
    scale = torch.full((6,), 0.7)

    def step(x, y):
        fn = lambda pair, z: {"a": (pair[0] + z) * scale, "b": [pair[1].sum(), z * pair[1]]}
        return map_function(fn, (x, x.cos()), x.mean())

    parity(lambda: plain(step, scale), steps=4)


def test_map_in_training():
    """The derivative for the mapped tensor is torch's, slice by slice."""

    def loss(model, x, y):
        return F.cross_entropy(map_function(lambda h: (h * h).tanh() + h, model(x)), y)

    parity(lambda: trained(loss, mlp()), steps=3)


CALLS: list[int] = []
SHARED = torch.ones(2, 3)


def counted(h):
    CALLS.append(1)
    return h * 2


MAP_REFUSED = [
    (counted, "the function of map has side effects"),
    (lambda h: F.dropout(h), "the function of map draws random numbers"),
    (lambda h: h * SHARED, "the function of map uses tensors that share memory"),
    (lambda h: 1, "the function of map returns a int, not tensors"),
]


@pytest.mark.parametrize(("function", "words"), MAP_REFUSED, ids=range(len(MAP_REFUSED)))
def test_map_refused(function, words):
    compiled = sidefx_train.compile(lambda x: map_function(function, x), backend="eager", fullgraph=True)
    with pytest.raises(sidefx_train.errors.GraphBreakError) as refusal:
        compiled(SHARED)
    assert refusal.value.reason.startswith(words)
    assert CALLS == []


def test_map_differentiates_closures():
    """Several results, and a weight of a closure, whose gradients torch adds over all slices."""

    def loss(model, x, y):
        hidden, doubled = map_function(lambda h: (model(h), h * 2), x)
        return F.cross_entropy(hidden, y) + doubled.mean()

    parity(lambda: trained(loss, mlp()), steps=3)


def test_map_of_many_slices():
    compiled = sidefx_train.compile(lambda x: map_function(torch.sin, x), backend="eager", fullgraph=True)
    x = torch.arange(200.0).view(100, 2)
    assert torch.equal(compiled(x), torch.sin(x))


def test_map_follows_the_number_of_slices():
    compiled = sidefx_train.compile(lambda x: map_function(torch.sin, x), backend="eager", on_failure="eager")
    for length in (2, 3, 5, 2):
        x = torch.arange(length * 2.0).view(length, 2)
        assert torch.equal(compiled(x), torch.sin(x))


def _advanced_by_both(x):
    items = iter([1, 2, 3])
    return torch.cond(x.sum() > 0, lambda x: (next(items), x)[1] * 2, lambda x: (next(items), x)[1] * 3, (x,))


def _advanced_by_one(x):
    items = zip([1, 2], {3: 4})
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: (next(items), x)[1] * 3, (x,))


def _advanced_per_row(x):
    items = iter({1: 2, 3: 4})
    return torch._higher_order_ops.map(lambda row: (next(items), row)[1] * 2, x)


@pytest.mark.parametrize("step", [_advanced_by_both, _advanced_by_one, _advanced_per_row])
def test_a_branch_that_advances_an_iterator_is_not_captured(step):
    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    with pytest.raises(GraphBreakError, match="iterator has given"):
        compiled(torch.ones(2, 2))


def test_an_iterator_inside_a_branch():
    def step(x):
        items = enumerate([1, 2, 3])
        next(items)
        y = torch.cond(x.sum() > 0, lambda x: x * sum(i for i, _ in zip([1, 2], [3, 4])), lambda x: x * 4, (x,))
        return y, next(items)

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for sign, expected in ((1.0, 3.0), (-1.0, -4.0)):
        y, after = compiled(torch.full((1,), sign))
        assert y.item() == expected and after == (1, 2)


def _of_sizes(space, x):
    rows = x.shape[0]
    return torch.cond(x.sum() > 0, lambda x: x * rows + x.shape[0], lambda x: x / (rows + 1), (x,))


def _of_counters(space, x):
    space.count += 1
    return torch.cond(x.sum() > 0, lambda x: x * space.count, lambda x: x - (space.count * 2 + 1), (x,))


def _sets_a_counter(space, x):
    def branch(x):
        space.count = x.shape[0] + 1
        return x * space.count

    return torch.cond(x.sum() > 0, branch, lambda x: branch(x) + 1, (x,)) * space.count


def _differentiated(space, x):
    space.count += 1
    weight = space.weight
    y = torch.cond(
        x.sum() > 0, lambda x: (x * weight * space.count).sum(0), lambda x: (x * weight).sum(0) / x.shape[0], (x,)
    )
    y.sum().backward()
    return y.detach(), weight.grad.clone()


def _mapped_and_scanned(space, x):
    space.count += 1
    mapped = map_function(lambda row: row * space.count + x.shape[0], x)
    _, scanned = scan(lambda carry, row: (carry + row * space.count, carry * 2), x[0].clone(), x)
    return mapped, scanned


def _plainly(name, space, x):
    """Runs such a step without operators that call functions: eager's own compiler refuses the side effects."""
    if name != "_mapped_and_scanned":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "cond", lambda chosen, one, other, operands: (one if chosen else other)(*operands))
            return globals()[name](space, x)
    space.count += 1
    carried = [x[0]]
    for row in x:
        carried.append(carried[-1] + row * space.count)
    return x * space.count + x.shape[0], torch.stack(carried[:-1]) * 2


@pytest.mark.parametrize(
    "name", ["_of_sizes", "_of_counters", "_sets_a_counter", "_differentiated", "_mapped_and_scanned"]
)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_changing_sizes_and_counters_in_branches(name, backend):
    compiled = sidefx_train.compile(globals()[name], backend=backend, fullgraph=True)
    space, plain = (types.SimpleNamespace(count=3, weight=torch.ones(2, requires_grad=True)) for _ in range(2))
    for rows, sign in ((3, 1.0), (4, -1.0), (5, 1.0), (6, -1.0), (3, -1.0)):
        x = torch.arange(1.0, 2 * rows + 1).view(rows, 2) * sign
        torch.testing.assert_close(
            compiled(space, x), _plainly(name, plain, x), rtol=1e-6 * (backend != "eager"), atol=0
        )
        assert space.count == plain.count
    assert len(compiled.report().captures) <= 3
