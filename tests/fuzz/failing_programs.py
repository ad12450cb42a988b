"""Random training steps of which some calls raise: anywhere, inside ``try`` and ``with``, by Python or a kernel.

python -m tests.fuzz.failing_programs FIRST COUNT [BACKEND]
"""

from __future__ import annotations

import random
import sys

from tests.fuzz.compare import Differs
from tests.fuzz.run import check

CALLS = 8

_PRELUDE = """
import random
from contextlib import suppress

import torch
from torch import nn
from torch.nn import functional as F


class World:
    pass


class Manager:
    def __init__(self, world):
        self.world = world

    def __enter__(self):
        self.world.log.append("enter")

    def __exit__(self, kind, value, trace):
        self.world.log.append(("exit", kind and kind.__name__))
        return kind is ZeroDivisionError


def refuse(w, flag):
    w.log.append("asked")
    if flag == "function":
        raise ValueError("function")
    w.table["function"] = 1


def build():
    torch.manual_seed(0)
    w = World()
    w.first, w.last, w.embedding, w.norm = nn.Linear(6, 8), nn.Linear(8, 5), nn.Embedding(7, 6), nn.BatchNorm1d(8)
    w.weights = [p for m in (w.first, w.last, w.embedding, w.norm) for p in m.parameters()]
    w.optimizer = OPTIMIZER
    w.scheduler = torch.optim.lr_scheduler.StepLR(w.optimizer, 2, 0.5)
    w.count, w.log, w.table, w.buffer, w.history, w.best = 0, [], {"a": 1, "b": 2.5}, torch.zeros(4), [], 1e9
    w.average = w.weights[0].detach().clone()
    w.fails = False

    def hook(grad):
        w.count += 1
        if w.fails:
            raise RuntimeError("in a hook")
        return grad * 1.0

    HOOK

    def step(x, places, labels, flag, key, n):
STEP
        return loss.detach()

    def arguments(index):
        flag, n = CALLS_OF[index]
        x, places, labels = torch.randn(3, 6), torch.randint(0, 7, (3,)), torch.randint(0, 5, (3,))
        w.fails, key = flag == "hook", {"key": "missing", "number": "x"}.get(flag, "a")
        if flag == "large":
            x += 1e4
        elif flag == "width":
            x = x[:, :5]
        elif flag == "nan":
            x[1, 1] = float("nan")
        elif flag == "place":
            places[1] = 9
        elif flag in ("label", "negative label"):
            labels[0] = 7 if flag == "label" else -3
        return x, places, labels, flag, key, n

    return step, lambda index: None, arguments, lambda: vars(w) | {"generator": torch.get_rng_state()}
"""

_EFFECTS = (
    "w.count += 1", "w.log.append(w.count)", "w.table['k'] = w.count * 2", "w.buffer.add_(1)",
    "w.buffer[n % 4] = float(n)", "w.history.append(x.sum().detach())", "w.buffer[:2] += torch.rand(2)",
    "w.table.pop('z', None); w.table['z'] = x.mean().detach()", "w.extra = n", "w.buffer = w.buffer * 1.5",
    "w.log = w.log + [n]", "w.table.update(a=n)", "w.log.insert(0, n)", "del w.table['a']; w.table['a'] = n",
    "w.average.mul_(0.9).add_(w.weights[0].detach(), alpha=0.1)", "w.history[-1:] = [x[0].detach().clone()]",
    "w.weights[2].data.add_(0.01)", "print('n', n)", "w.buffer.copy_(torch.arange(4.0) * n)",
    "w.history.append(w.buffer.clone())", "w.embedding.weight.grad = None",
)  # fmt: skip
_FAILURES = (
    "if flag == 'raise': raise ValueError('n is %d' % n)", "w.table[key]", "w.embedding(places).sum()",
    "assert x.sum().item() < 1000.0, 'large'", "x @ torch.ones(6, 2)", "1 / (n - 3)",
    "if torch.isnan(x).any(): raise FloatingPointError('nan')", "int(key) if flag == 'number' else 0",
    "torch.linalg.cholesky(torch.eye(3) * (1 - 2 * (flag == 'cholesky')))",
    "torch.ones(3)[places[:1] % 3 + (9 if flag == 'index' else 0)]", "w.missing if flag == 'attribute' else None",
    "x.view(7, 7) if flag == 'view' else x", "w.embedding(places + (100 if n == 4 else 0))", "refuse(w, flag)",
    "next(iter([])) if flag == 'next' else 1", "F.cross_entropy(x[:, :5], labels).item()",
    "torch.stack([x[0]] * (flag != 'stack'))", "labels.new_zeros(5).scatter_(0, labels, 1)", "F.one_hot(labels, 5)",
    "w.buffer[:3] += 10 // (labels - (labels if flag == 'divide' else 9))",
)  # fmt: skip
_FLAGS = (
    "raise", "key", "place", "large", "width", "nan", "cholesky", "number", "index", "attribute", "view", "function",
    "next", "label", "negative label", "stack", "hook", "divide",
)  # fmt: skip
_CAUGHT = ("Exception", "(ValueError, KeyError)", "RuntimeError", "(IndexError, ArithmeticError, AssertionError)")


def _training(draw: random.Random) -> list[str]:
    return [
        "h = torch.relu(w.first(x))",
        draw.choice(["h = w.norm(h)", "h = F.dropout(h, 0.3)", "h = h * 1.0"]),
        "loss = F.cross_entropy(w.last(h), labels)",
        draw.choice(["loss = loss + w.embedding(places).pow(2).mean()", "loss = loss * 1.5"]),
        f"w.optimizer.zero_grad(set_to_none={draw.choice([True, False])})",
        "loss.backward()",
        draw.choice(["nn.utils.clip_grad_norm_(w.weights, 1.0)", "w.count += 1", "w.best = min(w.best, loss.item())"]),
        "w.optimizer.step()",
        draw.choice(["w.scheduler.step()", "pass", "w.history.append(loss.detach())"]),
    ]


def _block(draw: random.Random, depth: int, training: list[str]) -> list[str]:
    """Returns the lines of a block that holds some statements of the training step, in order."""
    lines: list[str] = []
    while training or (depth and len(lines) < 3 and draw.random() < 0.75):
        kind = draw.random()
        if training and kind < 0.5:
            lines.append(training.pop(0))
        elif kind < 0.75:
            lines.append(draw.choice(_EFFECTS))
        elif kind < 0.88:
            lines.append(draw.choice(_FAILURES))
        elif depth < 2:
            inner = _block(draw, depth + 1, [training.pop(0)] if training and draw.random() < 0.4 else [])
            if not inner or draw.random() < 0.7:
                inner.insert(draw.choice([0, len(inner)]), draw.choice(_FAILURES))
            lines += _guarded(draw, ["    " + line for line in inner])
    return lines


def _guarded(draw: random.Random, inner: list[str]) -> list[str]:
    caught, effect, other = draw.choice(_CAUGHT), draw.choice(_EFFECTS), draw.choice(_EFFECTS)
    handled = ["try:", *inner, f"except {caught} as error:"]
    return draw.choice(
        [
            [*handled, "    w.log.append(type(error).__name__)", f"    {effect}"],
            [*handled, f"    {effect}", "else:", f"    {other}", "finally:", "    w.count += 10"],
            [*handled, "    w.log.append('again')", "    raise RuntimeError('outer') from error"],
            ["try:", *inner, "finally:", f"    {effect}"],
            [f"with suppress({caught.strip('()')}):", *inner],
            ["with Manager(w):", *inner],
        ]
    )


def program(seed: int) -> str:
    """Returns the source of a program."""
    draw = random.Random(seed)
    body = "\n".join(" " * 8 + line for line in _block(draw, 0, _training(draw)))
    optimizer = draw.choice(
        ["SGD(w.weights, 0.1, momentum=0.9)", "Adam(w.weights, 0.01)", "AdamW(w.weights, 0.01, foreach=False)"]
    )
    hook = draw.choice(["pass", "w.first.weight.register_hook(hook)", "w.last.bias.register_hook(hook)"])
    calls = []
    for index in range(CALLS):
        fails = index >= 2 and draw.random() < 0.5
        calls.append((draw.choice(_FLAGS) if fails else "", index if draw.random() < 0.7 else 1))
    source = _PRELUDE.replace("OPTIMIZER", f"torch.optim.{optimizer}").replace("HOOK", hook).replace("STEP", body)
    return source.replace("CALLS_OF", repr(calls))


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + count):
        try:
            print(seed, check(program(seed), *sys.argv[3:], calls=CALLS), flush=True)
        except Differs as error:
            print(seed, "differs:", error, flush=True)


if __name__ == "__main__":
    main()
