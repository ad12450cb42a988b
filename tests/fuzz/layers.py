"""Random chains of layers, forward and backward, through the default backend, with the usual last layers of networks.

A program is text: ``make()`` returns modules, ``forward(modules, x)`` runs convolutions, norms, activations, poolings,
softmax and reductions over axes of odd sizes, and ends in one of the usual losses. Several chains are compiled as one
step. Gradients are compared with float64; the tolerance is a multiple of eager's own error, or of the error of the
decomposed operators in float32: eager's norms compute in double, where two values under a norm lose all but rounding. A
norm of equal values multiplies rounding by 300, and eager may sum equal values without any: then also of the error that
eager has if each module rounds once more.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

import sidefx_train
from tests.fuzz.compare import Differs

FACTOR, FLOOR = 30.0, 3e-5
"""Largest error as a multiple of float32's error against float64, and the error always allowed, relative in norm."""

SMALLEST = 1e-2
"""Added to the norm of the largest gradient: some are zero but for rounding."""

_ACTIVATIONS = (
    "nn.ReLU()", "nn.GELU()", "nn.SiLU()", "nn.PReLU()", "nn.Softplus()", "nn.Hardtanh()", "nn.LeakyReLU(0.1)",
    "nn.Sigmoid()", "nn.Tanh()", "nn.ELU()", "nn.Hardswish()", "nn.Mish()", "nn.ReLU6()",
)  # fmt: skip


@dataclass
class Chain:
    """One chain of layers.

    Attributes:
        modules: expressions, each of one module.
        shape: shape of its input.
        loss: an expression over ``y``, the last value.
    """

    modules: list[str]
    shape: tuple[int, ...]
    loss: str

    def __str__(self) -> str:
        return f"shape={self.shape}; " + ", ".join(self.modules) + f"; loss={self.loss}"


class Lambda(nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.function = eval(f"lambda x: {text}", {"torch": torch, "F": F})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def generate(seed: int) -> Chain:
    """Returns the chain of a number."""
    draw = random.Random(seed)
    dims = draw.choice((1, 2, 2, 2, 3))
    width = draw.choice((2, 3, 4, 5, 8, 12, 16, 17, 20, 32))
    sizes = [draw.choice((5, 7, 8, 9, 12, 16, 17, 19, 24, 32)) for _ in range(dims)]
    if dims == 3:
        sizes = [draw.choice((4, 5, 6, 7, 8, 9)) for _ in range(dims)]
    batch = draw.choice((1, 2, 2, 3, 5))
    shape = (batch, width, *sizes)
    chain = Chain([], shape, "")
    probe = torch.zeros(shape)
    for _ in range(draw.randint(2, 7)):
        for _ in range(8):  # until one fits
            text = _layer(draw, probe, dims)
            try:
                with torch.no_grad():
                    after = build(text)(probe)
            except (RuntimeError, ValueError):
                continue
            if after.numel() < 2 or after.numel() > 60_000 or after.dim() != dims + 2:
                continue
            chain.modules.append(text)
            probe = after
            break
    chain.loss = _loss(draw, probe, dims)
    return chain


def build(text: str) -> nn.Module:
    """Builds the module of an expression."""
    module = eval(text, {"nn": nn, "Lambda": Lambda})
    assert isinstance(module, nn.Module), text
    return module


def _layer(draw: random.Random, x: torch.Tensor, dims: int) -> str:
    channels, kind = x.shape[1], draw.random()
    if kind < 0.28:
        kernel, stride = draw.choice((1, 2, 3, 3, 5)), draw.choice((1, 1, 1, 2))
        out = draw.choice((1, 2, 3, 4, 6, 8, 16, 18))
        groups = draw.choice([g for g in (1, 1, 1, 2, channels) if channels % g == 0 and out % g == 0] or [1])
        bias, padding = draw.random() < 0.7, draw.choice((0, kernel // 2))
        if draw.random() < 0.15:
            return f"nn.ConvTranspose{dims}d({channels}, {out}, {kernel}, {stride}, {kernel // 2}, bias={bias})"
        return f"nn.Conv{dims}d({channels}, {out}, {kernel}, {stride}, {padding}, groups={groups}, bias={bias})"
    if kind < 0.50:
        return draw.choice((
            f"nn.BatchNorm{dims}d({channels})", f"nn.BatchNorm{dims}d({channels})",
            f"nn.InstanceNorm{dims}d({channels}, affine={draw.random() < 0.5})",
            f"nn.GroupNorm({draw.choice([g for g in (1, 2, 4) if channels % g == 0])}, {channels})",
            f"nn.LayerNorm({list(x.shape[draw.choice((1, 2, -1)) :])})",
        ))  # fmt: skip
    if kind < 0.68:
        return draw.choice(_ACTIVATIONS)
    if kind < 0.84:
        kernel, stride = draw.choice((2, 3)), draw.choice((1, 2, 3))
        padding, ceil = draw.choice((0, 0, 1)), draw.random() < 0.4
        return draw.choice((
            f"nn.MaxPool{dims}d({kernel}, {stride}, {padding}, ceil_mode={ceil})",
            f"nn.AvgPool{dims}d({kernel}, {stride}, {padding}, ceil_mode={ceil},"
            f" count_include_pad={draw.random() < 0.5})",
            f"nn.AdaptiveAvgPool{dims}d({draw.choice((1, 2, 3, 5))})",
            f"nn.AdaptiveMaxPool{dims}d({draw.choice((1, 2, 3))})",
            f"nn.LPPool{dims}d(2, {kernel}, {stride}, ceil_mode={ceil})",
            f"nn.Upsample({draw.choice(('size=7', 'size=11', 'scale_factor=2', 'scale_factor=1.7'))}, mode="
            f"{draw.choice(['nearest', {1: 'linear', 2: 'bilinear', 3: 'trilinear'}[dims]])!r})",
        ))  # fmt: skip
    axis = draw.choice(range(1, dims + 2))
    axes = tuple(sorted(draw.sample(range(dims + 2), draw.randint(1, dims + 1))))
    return draw.choice((
        f"nn.Softmax({axis})", f"nn.LogSoftmax({axis})", f"Lambda('F.normalize(x, dim={axis})')",
        f"Lambda('x - x.mean({axes}, keepdim=True)')", f"Lambda('x / (1 + x.var({axes}, keepdim=True))')",
        f"Lambda('x * x.amax({axes}, keepdim=True)')", f"Lambda('x + x.sum({axes}, keepdim=True) / {x.numel()}')",
        f"Lambda('x - torch.logsumexp(x, {axes}, keepdim=True)')", "Lambda('x + x.roll(1, 1)')",
        "Lambda('torch.cat([x, x.flip(1) * 0.5], 1)')", _transposition(x, axis),
        f"Lambda('F.pad(x, (1, 0) * {dims})')", "Lambda('x.to(memory_format=torch.contiguous_format) * 1.5')",
        "nn.ChannelShuffle(2)" if dims == 2 and x.shape[1] % 2 == 0 else "Lambda('x * torch.tanh(x)')",
    ))  # fmt: skip


def _transposition(x: torch.Tensor, axis: int) -> str:
    """Returns a transposition, contiguous where a size is 1.

    Strides are ambiguous there, and the backward of eager's batch norm reads elements of another memory format: torch
    2.13 to 2.15 are off by as much as the gradient from finite differences, on the CPU in any dtype.
    """
    return f"Lambda('x.transpose({axis}, 1){'.contiguous()' if 1 in x.shape else ''}')"


def _loss(draw: random.Random, y: torch.Tensor, dims: int) -> str:
    sizes = tuple(y.shape[2:])
    labels = f"torch.arange({y.shape[0] * y[0, 0].numel()}).reshape({y.shape[0]}, *{sizes}) % {y.shape[1]}"
    return draw.choice((
        f"F.cross_entropy(y, {labels})", "1 - (2 * y.softmax(1)[:, 0].sum() + 1) / (y.softmax(1).sum() + 100)",
        "y.square().mean()", "F.mse_loss(y, torch.full_like(y, 0.3))", "(y.sigmoid() - 0.3).square().mean()",
        "(y.softmax(1) * y).sum((0, 1)).square().mean()", "y.flatten(1).logsumexp(1).mean()",
        "F.smooth_l1_loss(y, torch.zeros_like(y))", "y.abs().mean((0, 1)).amax()",
    ))  # fmt: skip


def check(numbers: range, **options: Any) -> None:
    """Compares the gradients of some chains, compiled as one step, with float64's.

    Raises:
        Differs: the errors of a chain are far larger than eager's; the message names the chain.
    """
    chains = [generate(number) for number in numbers]
    wanted, eager = _gradients(chains, torch.float64, None), _gradients(chains, torch.float32, None)
    found = _gradients(chains, torch.float32, options)
    for number, chain, want, plain, have in zip(numbers, chains, wanted, eager, found, strict=True):
        scale = max(grad.nan_to_num().norm().item() for grad in want) + SMALLEST
        for i, (a, b, c) in enumerate(zip(want, plain, have, strict=True)):
            off, usual = _distance(a, c) / scale, _distance(a, b) / scale
            if off <= FACTOR * usual + FLOOR:
                continue
            plainly = _distance(a, _decomposed(chains, number - numbers[0])[i]) / scale
            rounded = _distance(a, _rounded(chains, number - numbers[0])[i]) / scale
            if not off <= FACTOR * max(plainly, rounded) + FLOOR:
                text = f"off by {off:.2g}, eager by {usual:.2g}, decomposed operators by {plainly:.2g}"
                raise Differs(f"chain {number}, gradient {i}: {text}\n{chain}")


def _distance(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Returns the norm of the difference; infinite if not the same numbers are NaN."""
    if not torch.equal(wanted.isnan(), found.isnan()):
        return float("inf")
    return (wanted - found.double()).nan_to_num().norm().item()


def training_step(
    chains: list[Chain], dtype: torch.dtype = torch.float32, call: int = 0
) -> tuple[Callable[..., None], list[torch.Tensor]]:
    """Returns forward and backward of all chains as one step that takes their inputs, and inputs for it.

    The step has ``nets``, the modules of each chain.
    """
    losses = [eval(f"lambda y: {chain.loss}", {"torch": torch, "F": F}) for chain in chains]
    nets = []
    for chain in chains:
        torch.manual_seed(0)
        nets.append(nn.Sequential(*map(build, chain.modules)).to(dtype))

    def step(*inputs: torch.Tensor) -> None:
        for net, loss, x in zip(nets, losses, inputs, strict=True):
            net.zero_grad()
            x.grad = None
            loss(net(x)).backward()

    step.nets = nets  # type: ignore[attr-defined]
    return step, inputs_of(chains, dtype, call)


def inputs_of(chains: list[Chain], dtype: torch.dtype, call: int) -> list[torch.Tensor]:
    """Returns an input for each chain; its numbers depend only on ``call``."""
    draw = torch.Generator().manual_seed(call)
    return [torch.randn(chain.shape, generator=draw).to(dtype).requires_grad_() for chain in chains]


class _Decomposing(TorchDispatchMode):
    """Runs operators by their decompositions, in the dtype of their arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        decomposition = decomposition_table.get(func)
        found = NotImplemented if decomposition is None else decomposition(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is NotImplemented else found


def _decomposed(chains: list[Chain], index: int) -> list[torch.Tensor]:
    """Returns the gradients of one chain in float32, eagerly, by the decompositions of its operators."""
    with _Decomposing():
        return _gradients(chains, torch.float32, None)[index]


def _rounded(chains: list[Chain], index: int) -> list[torch.Tensor]:
    """Returns the gradients of one chain in float32, eagerly, if what each module returns is rounded once more."""
    draw = torch.Generator().manual_seed(0)

    def round_once(module: nn.Module, given: Any, y: torch.Tensor) -> torch.Tensor:
        return y * (1 + torch.finfo(y.dtype).eps * (torch.rand(y.shape, generator=draw) - 0.5))

    handle = nn.modules.module.register_module_forward_hook(round_once)
    try:
        return _gradients(chains, torch.float32, None)[index]
    finally:
        handle.remove()


def _gradients(chains: list[Chain], dtype: torch.dtype, options: dict[str, Any] | None) -> list[list[torch.Tensor]]:
    """Returns the gradients of the input and the parameters of each chain, after two steps."""
    step, inputs = training_step(chains, dtype)
    run = step if options is None else sidefx_train.compile(step, rng="eager", **options)
    for call in range(2):
        inputs = inputs_of(chains, dtype, call)
        run(*inputs)
    if options is not None:
        report = sidefx_train.explain(run)
        bad = [each for each in (*report.fallbacks, *report.breaks) if each.code in ("SFX201", "SFX204", "SFX205")]
        if bad:
            raise Differs(f"chains {[str(chain) for chain in chains]}: {bad[0].code} {bad[0].reason}")
    nets = step.nets  # type: ignore[attr-defined]
    grads = [[x.grad, *(p.grad for p in net.parameters())] for x, net in zip(inputs, nets, strict=True)]
    return [[torch.zeros(1) if g is None else g for g in each] for each in grads]
