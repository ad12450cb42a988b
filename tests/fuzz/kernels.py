"""Random tensor functions, large enough for Inductor to fuse their loops; ``generate.py`` does the same for Python.

Each is a program as text: ``build(x, y, w, b, ids)`` computes values of one shape from others, by norms, reductions,
random masks, products, views, in-place writes, gathers and sums by index, and returns some of them.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from typing import Any

import torch

import sidefx_train
from tests.fuzz.compare import Differs

ROWS, LENGTH, WIDTH = 8, 16, 24
CALLS = 2
CLOSE = 1e-3
"""Largest difference, relative in norm, between eager's values and the compiled ones."""

_FILE = "<kernels>"
_HEAD = "import torch\nimport torch.nn.functional as F\n\n\ndef build(x, y, w, b, ids):\n"

_TEMPLATES = (
    "F.relu({0})", "F.gelu({0})", "torch.tanh({0})", "torch.sigmoid({0}) * {1}", "F.silu({0})", "{0} + {1}",
    "{0} - {1}",
    "{0} * torch.tanh({1})", "torch.maximum({0}, {1})", "{0} + b", "{0} * (1 + b)",
    "F.layer_norm({0}, ({W},), 1 + b, b)", "F.layer_norm({0}, ({W},))", "F.rms_norm({0}, ({W},), 1 + b)",
    "F.group_norm({0}, 4)", "F.batch_norm({0}.transpose(1, 2), None, None, 1 + b, b, True).transpose(1, 2)",
    "F.softmax({0}, {axis})", "F.log_softmax({0}, {axis})", "F.normalize({0}, dim={axis})",
    "{0} - {0}.mean({axis}, keepdim=True)", "{0} / (1 + {1}.abs().sum({axis}, keepdim=True))",
    "{0} - {1}.amax({axis}, keepdim=True)", "{0} * {1}.var({axis}, keepdim=True)",
    "({0} + {1}.sum((0, 1))).tanh()", "{0} + {1}.logsumexp({axis}, keepdim=True)", "torch.cumsum({0}, {axis}) / 8",
    "F.dropout({0}, {p})", "F.dropout({0} + {1}, {p}) + {0}", "{0} * torch.empty_like({1}).bernoulli_({p})",
    "{0} + torch.rand_like({1})", "{0} * torch.randn({R}, {L}, 1)", "F.dropout1d({0}, {p})",
    "{0} @ w", "F.linear({0}, w, b)", "F.linear(F.gelu({0} @ w), w, b)", "torch.bmm({0} @ {1}.mT / {W}, {0})",
    "F.softmax({0} @ {1}.mT, -1) @ {0}", "F.dropout(F.softmax({0} @ {1}.mT, -1), {p}) @ {1}",
    "F.conv1d({0}, b.view(1, 1, -1)[..., :3].expand({L}, {L}, 3), padding=1)",
    "{0}.flip({axis})", "{0}.roll(3, {axis})", "{0}.transpose(0, 1).reshape({R}, {L}, {W})",
    "{0}.mT.contiguous().view({R}, {L}, {W})", "torch.cat([{0}[:, 3:], {1}[:, :3]], 1)",
    "torch.stack([{0}[..., ::2], {1}[..., 1::2]], -1).flatten(2)", "F.pad({0}, (0, 0, 1, 0))[:, :-1]",
    "torch.cat({0}.chunk(2, -1)[::-1], -1)", "F.pad({0}[:, 2:-2], (0, 0, 2, 2))",
    "{0}[:, ids[0]]", "F.embedding(ids, {0}[0])", "{0}.gather(1, ids[..., None].expand(-1, -1, {W}))",
    "{0}.index_add(1, ids[0], {1})", "{0}.scatter_add(1, ids[..., None].expand(-1, -1, {W}), {1}) / 2",
    "{0}.masked_fill(ids[..., None] > 7, 0.5)", "torch.where(ids[..., None] % 2 == 0, {0}, {1})",
    "F.max_pool1d({0}, 3, 1, 1)", "F.avg_pool1d({0}, 3, 1, 1)", "F.glu(torch.cat([{0}, {1}], -1), -1)",
    "{0}.double().mul(1.5).float()",
)  # fmt: skip

_WRITES = (
    "{0}.mul_(torch.tanh({1}))", "{0}[:, 1:5].add_({1}[:, 3:7])", "{0}[..., ::2] = {1}[..., 1::2]",
    "{0}[ids[0, :3]] = 1.0",
    "{0}.mT[0].add_(1)", "{0}.flatten()[::5].mul_(0.5)", "F.dropout({0}, {p}, inplace=True)", "{0}.clamp_(-2, 2)",
    "{0}.select(1, 0).copy_({1}[:, 2])", "F.relu({0}, inplace=True)", "{0}.index_add_(1, ids[0], {1})",
)  # fmt: skip


def generate(seed: int) -> str:
    """Returns the program of a number."""
    draw = random.Random(seed)
    values, lines = ["x", "y"], []

    def filled(template: str, first: str | None = None) -> str:
        near = values[-4:]
        return template.format(
            first or draw.choice(near),
            draw.choice(values),
            axis=draw.choice((0, 1, 2, -1)),
            p=draw.choice((0.1, 0.3, 0.5)),
            R=ROWS, L=LENGTH, W=WIDTH,
        )  # fmt: skip

    for number in range(draw.randint(4, 14)):
        name = f"v{number}"
        if draw.random() < 0.15:
            lines += [f"{name} = {draw.choice(values[-4:])}.clone()", filled(draw.choice(_WRITES), name)]
        else:
            lines.append(f"{name} = {filled(draw.choice(_TEMPLATES))}")
        values.append(name)
    kept = draw.sample(values[2:], min(len(values) - 2, draw.randint(1, 3)))
    if values[-1] not in kept:
        kept.append(values[-1])
    lines.append(f"return {', '.join(kept)},")
    return _HEAD + "".join(f"    {line}\n" for line in lines)


def check(source: str, compiled: Callable[..., Any] = sidefx_train.compile, **options: Any) -> None:
    """Compares results and gradients of the program with those of the compiled one, from the same random numbers.

    Args:
        source: the program.
        compiled: compiles a function; called with it and with options.
        options: further options.

    Raises:
        Differs: they differ; the message shows where.
    """
    linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
    names: dict[str, Any] = {}
    exec(compile(source, _FILE, "exec"), names)
    build = names["build"]

    def train(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = build(*leaves)
        sum((result.float().square().mean() for result in results), torch.zeros(())).backward()
        return tuple(result.detach() for result in results)

    for function in (build, train):
        step = compiled(function, rng="eager", **options)
        for call in range(CALLS):
            want, wanted = _called(function, call, function is train)
            have, had = _called(step, call, function is train)
            where = f"{function.__name__}, call {call}"
            for i, (a, b) in enumerate(zip(want, have, strict=True)):
                _close(a, b, f"{where}: result {i}")
            for name, a, b in zip("xywb", wanted, had, strict=True):
                _close(a, b, f"{where}: gradient of {name}")
        for fallback in (*step.report().fallbacks, *step.report().breaks):
            if fallback.code in ("SFX201", "SFX204", "SFX205"):
                raise Differs(f"{function.__name__}: {fallback.code} {fallback.reason}")


def _called(function: Callable[..., Any], call: int, trains: bool) -> tuple[list[torch.Tensor], list[Any]]:
    torch.manual_seed(10 + call)
    shape = (ROWS, LENGTH, WIDTH)
    leaves = [torch.randn(shape), torch.randn(shape), torch.randn(WIDTH, WIDTH) / 5, torch.randn(WIDTH) / 5]
    for leaf in leaves:
        leaf.requires_grad_()
    ids = torch.randint(0, ROWS, (ROWS, LENGTH))
    results = function(*leaves, ids)
    if not trains:
        sum((result.float().square().mean() for result in results), torch.zeros(())).backward()
    return [result.detach() for result in results], [leaf.grad for leaf in leaves]


def _close(want: Any, have: Any, where: str) -> None:
    if want is None or have is None:
        if want is not have:
            raise Differs(
                f"{where}: {'none' if have is None else 'one'}, eager has {'none' if want is None else 'one'}"
            )
        return
    if want.shape != have.shape or want.dtype != have.dtype:
        raise Differs(f"{where}: {have.dtype} {tuple(have.shape)}, eager's {want.dtype} {tuple(want.shape)}")
    if torch.equal(want.isfinite(), have.isfinite()):
        want, have = want.nan_to_num(0, 0, 0), have.nan_to_num(0, 0, 0)
    off, allowed = (want - have).norm().item(), CLOSE * (want.norm().item() + 1e-3)
    if not off <= allowed:
        raise Differs(f"{where}: off by {off:.3g} in norm, {allowed:.3g} allowed")
