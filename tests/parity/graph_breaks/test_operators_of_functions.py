"""Operators that call functions, other than ``cond``, ``while_loop`` and ``map``: the functions are interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops import foreach_map, scan, while_loop
from torch._higher_order_ops.out_dtype import out_dtype
from torch._higher_order_ops.strict_mode import strict_mode
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode

import sidefx_train
from tests.support.parity import Program, batches, parity
from tests.support.training_steps import trained


def plain(step, *watch) -> Program:
    return Program(step, batches((5, 6), classes=3), watch)


# ---------------------------------------------------------------------- scan
def test_scan():
    def step(x, y):
        fn = lambda carry, row: ({"sum": carry["sum"] + row}, (row * 2, carry["sum"].sin()))
        return scan(fn, {"sum": x[0].clone()}, x), scan(lambda c, r: (c + r, c * r), x[:, 0].clone(), x.cos(), dim=1)

    parity(lambda: plain(step), steps=3)


def recurrent(model, x, y):
    """The cell's weights are closure variables; torch adds their gradients step by step."""

    def advance(hidden, row):
        hidden = torch.tanh(model(torch.cat([hidden, row], -1))) * torch.tensor(0.9)
        return hidden, hidden.clone()

    last, states = scan(advance, torch.zeros(6), x)
    return F.cross_entropy(states[:, :3] + last[:3], y)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_scan_in_training(backend):
    parity(lambda: trained(recurrent, nn.Linear(12, 6)), steps=3, backend=backend)


@pytest.mark.slow
def test_scan_in_training_inductor():
    parity(lambda: trained(recurrent, nn.Linear(12, 6)), steps=3, backend="inductor")


def test_backward_of_a_scan_outside():
    weight = torch.linspace(0.1, 0.9, 3, requires_grad=True)
    compiled = sidefx_train.compile(
        lambda x: scan(lambda c, row: ((c * weight).tanh() + row, c * weight), x[0].clone(), x),
        backend="eager",
        fullgraph=True,
    )

    def gradient(fn):
        last, states = fn(torch.arange(12.0).view(4, 3) / 5)
        return torch.autograd.grad(last.sum() + states.square().sum(), weight)[0]

    def eager(x):
        return scan(lambda c, row: ((c * weight).tanh() + row, c * weight), x[0].clone(), x)

    assert torch.equal(gradient(compiled), gradient(eager))


SEEN: list[int] = []
SCAN_REFUSED = [
    (lambda c, row: (SEEN.append(1), (c + row, c * row))[1], "the function of scan has side effects"),
    (lambda c, row: (c + torch.rand(3), c * row), "the function of scan draws random numbers"),
    (lambda c, row: (c + row, 1), "the function of scan returns a int, not tensors"),
]


@pytest.mark.parametrize(("function", "words"), SCAN_REFUSED, ids=range(len(SCAN_REFUSED)))
def test_scan_refused(function, words):
    compiled = sidefx_train.compile(lambda x: scan(function, x[0].clone(), x), backend="eager", fullgraph=True)
    with pytest.raises(sidefx_train.errors.GraphBreakError) as refusal:
        compiled(torch.ones(2, 3))
    assert refusal.value.reason.startswith(words)
    assert SEEN == []


def test_loops_and_constants_inside_a_loop():
    def step(x, y):
        def body(count, value):
            inner = lambda n, v: (n + 1, v + torch.tensor(0.5))
            return count + 1, while_loop(lambda n, v: n < count, inner, (torch.tensor(0), value))[1]

        carried = {"count": torch.tensor(0), "value": x}
        outer = while_loop(lambda count, value: count < 3, body, (torch.tensor(0), x))
        nested = while_loop(
            lambda d: d["count"] < 3, lambda d: ({"count": d["count"] + 1, "value": d["value"] * 2},), (carried,)
        )
        return outer, nested

    parity(lambda: plain(step), steps=2)


# ---------------------------------------------------------------------- flex_attention
def attention_inputs(call: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(call)
    return tuple(torch.randn(1, 2, 16, 8) for _ in range(3))


def test_flex_attention():
    slope = torch.tensor([0.3, 0.7])

    def step(q, k, v):
        mask = create_block_mask(lambda b, h, m, n: m >= n, None, None, 16, 16, device="cpu")
        score = lambda s, b, h, m, n: s - slope[h] * (m - n)
        return flex_attention(q, k, v, block_mask=mask), flex_attention(q, k, v, score_mod=score, return_lse=True)

    parity(lambda: Program(step, attention_inputs, (slope,)), steps=2)


def test_flex_attention_that_is_differentiated_is_not_captured():
    bias = torch.zeros(16, requires_grad=True)

    def step(q, k, v):
        flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + bias[m]).sum().backward()

    compiled = sidefx_train.compile(step, backend="eager")
    compiled(*attention_inputs(0))
    found, bias.grad = bias.grad, None
    step(*attention_inputs(0))
    assert torch.equal(found, bias.grad)
    assert {each.reason for each in compiled.report().breaks} == {"differentiates flex_attention"}


# ---------------------------------------------------------------------- others
def test_kernels_in_python():
    def step(x, y):
        whole = (x * 4).to(torch.int8)
        return (
            out_dtype(torch.ops.aten.mm.default, torch.int32, whole, whole.t()),
            strict_mode(lambda x: (x.sin(),), (x,)),
            foreach_map(torch.add, [x, x.cos()], [x.sin(), x]),
            wrap_with_set_grad_enabled(False, lambda x: x * 2, x),
            wrap_with_autocast("cpu", torch.bfloat16, True, None, lambda x: x @ x.t(), x),
        )

    parity(lambda: plain(step), steps=2)


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_a_mode_is_asked_for_the_operator():
    def names(wrap) -> list[str]:
        mode = Counting()

        def step(x):
            with mode:
                return out_dtype(torch.ops.aten.mm.default, torch.int32, x, x)

        wrap(step)(torch.ones(2, 2, dtype=torch.int8))
        return mode.names

    assert names(lambda f: sidefx_train.compile(f, backend="eager", fullgraph=True)) == names(lambda f: f)


def test_a_weight_cast_by_autocast_in_a_branch():
    weight = torch.ones(3, 3, requires_grad=True)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.cond(x.sum() > 0, lambda x: x @ weight, lambda x: (x + 1) @ weight, (x,)) @ weight

    compiled = sidefx_train.compile(step, backend="eager")
    for sign in (1.0, -1.0):
        assert torch.equal(compiled(torch.full((3, 3), sign)), step(torch.full((3, 3), sign)))
    (found,) = compiled.report().breaks
    assert found.reason == "the true branch of torch.cond casts a weight, in an autocast region"


def test_the_operator_of_scan_does_not_differentiate_closures():
    """Eager loses that derivative if the operator is called itself: a weight of a closure is no operand."""
    weight = torch.ones(3, requires_grad=True)
    step = lambda x: torch.ops.higher_order.scan(lambda c, row: (c * weight, c + row), [x[0].clone()], [x], ())[1]
    compiled = sidefx_train.compile(step, backend="eager", on_failure="eager")
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(compiled(x), step(x)) and not compiled(x).requires_grad
    reasons = [each.reason for each in (*compiled.report().breaks, *compiled.report().fallbacks)]
    assert reasons == ["the operator scan is called with a function that uses a weight"]


def test_operators_called_with_lists_from_outside():
    rows, start, others = [torch.ones(3, 2), torch.full((3, 2), 2.0)], [torch.zeros(2)], [torch.ones(2)]
    ops = torch.ops.higher_order

    def step(rows, start, others):
        mapped = ops.map_impl(lambda a, b, c: (a * b + c,), rows, others)
        scanned = ops.scan(lambda c, a, b, d: (c + a * b + d, c * 1), start, rows, others)
        return mapped, scanned, ops.while_loop(lambda c, d: c.sum() < 9, lambda c, d: (c + d,), start, others)

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    mapped, scanned, looped = compiled(rows, start, others)
    assert torch.equal(mapped[0], torch.full((3, 2), 3.0))
    assert torch.equal(scanned[0], torch.full((2,), 9.0)) and torch.equal(looped[0], torch.full((2,), 5.0))
