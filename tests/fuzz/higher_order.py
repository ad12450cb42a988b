"""Random programs that differentiate a captured function several times, as source.

A program defines ``program(wrap)``: it builds tensors, wraps a function, computes gradients of gradients of the
function's result, and returns all numbers and hook calls that a user would see.

python -m tests.fuzz.higher_order FIRST COUNT [BACKEND]
"""

from __future__ import annotations

import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

import sidefx_train

HEADER = '''
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

def shown(grad):
    return round(float(f"{grad.sum().item():.6g}"), 6) + 0.0

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x

class Scaled(torch.autograd.Function):
    """Saves its result, and what is neither an argument nor a result."""
    @staticmethod
    def forward(ctx, x, y):
        made = x.tanh() * y
        ctx.save_for_backward(made, x.tanh(), y)
        return made
    @staticmethod
    def backward(ctx, grad):
        made, t, y = ctx.saved_tensors
        return grad * (1 - t * t) * y, grad * t

class Straight(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""
    @staticmethod
    def forward(ctx, x):
        return x.round()
    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5

'''

UNARY = [
    "{a}.tanh()",
    "{a}.sin()",
    "{a}.sigmoid()",
    "({a} * 0.1).exp()",
    "{a}.softmax(1)",
    "{a}.log_softmax(0)",
    "{a}.pow(3)",
    "F.gelu({a})",
    "F.silu({a})",
    "F.softplus({a})",
    "F.layer_norm({a}, (4,))",
    "F.layer_norm({a}, (4,), v, v)",
    "{a}.t()",
    "{a}.cumsum(0)",
    "({a} * {a} + 1).sqrt()",
    "({a}.square() + 1).log()",
    "{a}.relu()",
    "{a}.clamp(-1, 1)",
    "{a}.detach() * {a}",
    "{a}.flip(0)",
    "{a}.roll(1, 1)",
    "{a} / (1 + {a}.norm())",
    "{a} - {a}.mean(0, keepdim=True)",
    "{a}.var(1, keepdim=True) * {a}",
    "{a}.logsumexp(1, keepdim=True) + {a}",
    "torch.cat([{a}[:, 2:], {a}[:, :2] * 2], 1)",
    "{a}[torch.tensor([0, 2, 1, 1])]",
    "{a}.gather(1, torch.tensor([[0, 1, 1, 3]] * 4))",
    "{a}.tril()",
    "{a}.masked_fill({a} > 0.5, 0.25)",
    "{a}.abs() * {a}",
    "F.linear({a}, w, v)",
    "F.batch_norm({a}, None, None, v, None, True)",
    "Cube.apply({a})",
    "Straight.apply({a}) * {a}",
    "checkpoint(lambda t: (t @ w).sin() * t, {a}, use_reentrant=False)",
    "{a}.view(2, 8).sin().view(4, 4)",
    "{a}.unsqueeze(0).expand(3, 4, 4).sum(0) * {a}",
    "{a}.reshape(2, 2, 4).transpose(1, 2).reshape(4, 4)",
    "F.conv1d({a}.unsqueeze(0), w.unsqueeze(2)).squeeze(0)",
    "{a}.clone().mul_(2).sin_()",
    "torch.where({a} > 0, {a} * {a}, {a}.sin())",
    "{a}.max(1, keepdim=True).values * {a}",
    "{a}.diagonal().diag() + {a}",
    "F.dropout({a}, 0.5)",
    "{a}.double()",
    "{a}.sum() * {a}",
    "F.normalize({a}, dim=1)",
    "F.pad({a}[1:], (0, 0, 1, 0)) * {a}",
]
BINARY = [
    "{a} + {b}",
    "{a} - {b}",
    "{a} * {b}",
    "{a} @ {b}",
    "{a} / ({b} * {b} + 1)",
    "torch.maximum({a}, {b})",
    "torch.addmm({a}, {b}, w)",
    "Scaled.apply({a}, {b})",
    "torch.einsum('ij,kj->ik', {a}, {b})",
    "torch.bmm({a}.view(2, 2, 4), {b}.view(2, 4, 2)).reshape(2, 4).repeat(2, 1)",
    "torch.lerp({a}, {b}, 0.3)",
    "F.mse_loss({a}, {b}) * {a}",
    "torch.atan2({a}, {b} + 3)",
    "torch.outer({a}[0], {b}[:, 0])",
    "{a}.clone().add_({b})",
    "torch.addcmul({a}, {b}, w)",
    "F.scaled_dot_product_attention({a}.unsqueeze(0), {b}.unsqueeze(0), {a}.unsqueeze(0)).squeeze(0)",
    "torch.baddbmm({a}.unsqueeze(0), {b}.unsqueeze(0), w.unsqueeze(0)).squeeze(0)",
    "torch.stack([{a}, {b}]).sum(0).sin()",
    "{a} * {b}.detach()",
    "F.smooth_l1_loss({a}, {b}, reduction='none')",
]


def generate(draw: Callable[[int], int]) -> str:
    """Returns a program; ``draw(n)`` returns a number below ``n``."""

    def pick(options: Any) -> Any:
        return options[draw(len(options))]

    names, body = ["x", "y", "w"], []
    for number in range(2 + draw(6)):
        name = f"h{number}"
        kind = draw(12)
        if kind < 6:
            body.append(f"{name} = " + pick(UNARY).format(a=pick(names)))
        elif kind < 10:
            body.append(f"{name} = " + pick(BINARY).format(a=pick(names), b=pick(names)))
        elif kind == 10:
            body.append(f"{name}, {name}b = ({pick(names)} * 1).chunk(2, 1)")
            body.append(f"{name} = torch.cat([{name}b.sin() + {name}, {name} * {name}b], 1)")
        elif draw(2):
            body.append(f"{name} = {pick(names)} * 1")
            body.append(f"{name}.register_hook(lambda g: g * {1 + draw(3)})")
        else:
            body.append(f"with torch.no_grad(): {name} = {pick(names)} * {pick(names)}")
        names.append(name)
    returned = [names[-1]]
    if draw(3) == 0:
        returned.append(pick(names[3:]))
    results = ", ".join(f"{name} * 1" if name in "xyw" or draw(4) == 0 else name for name in dict.fromkeys(returned))
    brk = draw(5) == 0
    lines = ["def program(wrap):", "    seen, log = [], []"]
    grads = [draw(4) > 0 for _ in range(4)]
    for i, (name, shape) in enumerate((("x", (4, 4)), ("y", (4, 4)), ("w", (4, 4)), ("v", (4,)))):
        grad = f".requires_grad_({grads[i]})" if name not in "w" else ".requires_grad_()"
        made = f"torch.randn{shape if len(shape) > 1 else '(4)'}.double().mul_(0.7)"
        lines.append(f"    {name} = {made}{grad}")
    outside = draw(4) == 0
    if outside:
        lines.append("    x = x.cos() * w.detach()" if draw(2) else "    x = x * w")
    if draw(4) == 0:
        name = pick(["y", "w"])
        lines.append(f"    if {name}.requires_grad: {name}.register_hook(lambda g: log.append(('{name}', shown(g))))")
    lines.append("    def fn(x, y):")
    at = draw(len(body) + 1) if brk else -1
    for i, line in enumerate(body):
        if i == at:
            lines.append("        if float(x.detach().sum()) < 1e9: log.append('break')")
        lines.append(f"        {line}")
    lines.append(f"        return ({results},)")
    lines += ["    call = wrap(fn)", "    for turn in range(2):"]
    lines += ["        torch.manual_seed(turn)", "        outs = call(x, y)"]
    if draw(4) == 0 and len(set(returned)) == 1 and not any("register_hook" in line for line in body):
        lines.append("        outs[0].register_hook(lambda g: log.append(('out', shown(g))))")
    loss = pick(
        [
            "sum(o.sin().sum() for o in outs)",
            "outs[0].square().mean()",
            "sum((o * o.detach()).sum() for o in outs)",
            "outs[-1].sum()",
        ]
    )
    inputs = [n for n in ("x", "y", "w", "v") if draw(2)] or ["w"]
    lines.append(f"        loss = {loss}")
    lines.append("        if not loss.requires_grad: continue")
    lines.append(f"        inputs = [t for t in [{', '.join(inputs)}] if t.requires_grad] or [w]")
    lines.append("        g = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)")
    lines.append("        seen += g")
    lines.append("        g = [t for t in g if t is not None and t.requires_grad]")
    lines.append("        if not g: continue")
    second = pick(
        [
            "sum(t.square().sum() for t in g)",
            "sum((t * t.detach().cos()).sum() for t in g)",
            "g[0].norm()",
            "sum(t.tanh().sum() for t in g) + loss",
        ]
    )
    lines.append(f"        two = {second}")
    ending = draw(5)
    if ending == 0:
        lines.append("        two.backward()")
    elif ending == 1:
        lines.append("        (two + loss).backward()")
    elif ending == 2:
        lines.append("        h = torch.autograd.grad(two, inputs, allow_unused=True)")
        lines.append("        seen += h")
    else:
        lines.append("        h = torch.autograd.grad(two, inputs, create_graph=True, allow_unused=True)")
        lines.append("        seen += h")
        lines.append("        h = [t for t in h if t is not None and t.requires_grad]")
        lines.append("        if h: sum((t / t.detach().abs().clamp(min=1)).sin().sum() for t in h).backward()")
    lines.append("        for t in (x, y, w, v):")
    lines.append("            if t.is_leaf: seen.append(None if t.grad is None else t.grad.clone()); t.grad = None")
    lines.append(
        "        with torch.no_grad(): w.mul_(0.9)"
        if not outside
        else "        y = y.detach().requires_grad_(y.requires_grad)"
    )
    if outside:
        lines.append("        break")
    lines.append("    return seen, log")
    return HEADER + "\n".join(lines) + "\n"


def outcome(source: str, wrap: Callable[..., Any]) -> Any:
    """Returns the result of a program, or the error it raises."""
    space: dict[str, Any] = {}
    exec(compile(source, "<program>", "exec"), space)
    torch.manual_seed(0)
    try:
        return space["program"](wrap)
    except Exception as error:
        if isinstance(error, sidefx_train.errors.SideFXError):
            return f"SFX {error}"
        return f"{type(error).__name__}: {str(error)[:60]}"


def difference(source: str, backend: str = "eager", tolerance: float = 1e-9) -> tuple[str, list[Any]]:
    """Returns the difference between eager and captured, and the reports."""
    steps: list[Any] = []

    def wrap(fn: Callable[..., Any]) -> Any:
        steps.append(sidefx_train.compile(fn, backend=backend, rng="eager"))
        return steps[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want, have = outcome(source, lambda fn: fn), outcome(source, wrap)
    return _differs(want, have, tolerance), steps


def _differs(want: Any, have: Any, tolerance: float) -> str:
    if isinstance(want, str) or isinstance(have, str):
        return "" if want == have else f"{str(have)[:300]}, eager {str(want)[:100]}"
    if repr(want[1]) != repr(have[1]):
        return f"hooks {have[1]}, eager {want[1]}"
    for i, (a, b) in enumerate(zip(want[0], have[0], strict=True)):
        if (a is None) != (b is None):
            return f"gradient {i}: {b if b is None else 'some'}, eager {a if a is None else 'some'}"
        if a is not None and not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"gradient {i} is off by {(a - b).abs().max().item():.2g}"
        if a is not None and a.requires_grad != b.requires_grad:
            return f"gradient {i}: requires_grad {b.requires_grad}"
    return ""


def from_seed(seed: int) -> str:
    return generate(random.Random(seed).randrange)


def main() -> None:
    first, count, backend = int(sys.argv[1]), int(sys.argv[2]), (sys.argv[3:] or ["eager"])[0]
    began, wrong, captured, reasons = time.time(), 0, 0, dict[str, int]()
    for seed in range(first, first + count):
        source = from_seed(seed)
        try:
            found, steps = difference(source, backend, 1e-9 if backend == "eager" else 1e-6)
        except Exception:
            found, steps = "broken: " + traceback.format_exc(limit=-3), []
        for step in steps:
            captured += step.report().replays > 0
            for each in (*step.report().breaks, *step.report().fallbacks):
                text = f"{each.code} {each.reason[:110]}"
                reasons[text] = reasons.get(text, 0) + 1
        if found:
            wrong += 1
            print(f"--- seed {seed}: {found}\n{source[len(HEADER) :]}", flush=True)
    print(f"{count} programs from seed {first}, {captured} captured, {wrong} differ, {time.time() - began:.0f} s")
    for text, number in sorted(reasons.items(), key=lambda item: -item[1])[:20]:
        print(f"{number:5} {text}")


if __name__ == "__main__":
    main()
