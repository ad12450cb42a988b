"""Runs every pooling and normalization over odd sizes, strides and paddings through Inductor: values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import sidefx_train
from tests.opinfo.variants import Result

AT_ONCE = 24
"""Number of layers compiled as one step."""

CLOSE = 1e-4


@dataclass(frozen=True)
class Layer:
    """One layer with its arguments.

    Attributes:
        name: description of the layer.
        build: builds it, with nontrivial parameters.
        size: shape of its input.
    """

    name: str
    build: Callable[[], nn.Module]
    size: tuple[int, ...]


@dataclass(frozen=True)
class LayerInfo:
    """All variants of one layer."""

    layers: tuple[Layer, ...]


def layer_entries() -> dict[str, LayerInfo]:
    """Returns all layers by name, in groups that are compiled as one step each."""
    found: dict[str, LayerInfo] = {}
    for name, layers in {**_poolings(), **_norms()}.items():
        rest, count = iter(layers), 0
        while group := tuple(islice(rest, AT_ONCE)):
            found[f"layer {name} {count}"] = LayerInfo(group)
            count += 1
    return found


def _sizes(dims: int) -> tuple[tuple[int, ...], ...]:
    return tuple((2, 3, *size[:dims]) for size in ((7, 9, 8), (8, 5, 6)))


def _poolings() -> dict[str, Iterator[Layer]]:
    def made(kind: str, dims: int, names: tuple[str, ...], values: Any) -> Iterator[Layer]:
        cls = getattr(nn, f"{kind}{dims}d")
        for size, each in product(_sizes(dims), values):
            options = dict(zip(names, each, strict=True))
            if options.get("padding", 0) * 2 > options["kernel_size"] if "kernel_size" in options else False:
                continue
            yield Layer(f"{cls.__name__}({options}) of {size}", lambda c=cls, o=options: c(**o), size)

    found: dict[str, Iterator[Layer]] = {}
    for dims in (1, 2, 3):
        windows = product((2, 3), (1, 2, 3), (0, 1), (False, True))
        names = ("kernel_size", "stride", "padding", "ceil_mode")
        counted = ((*window, counts) for window, counts in product(windows, (False, True)))
        found[f"AvgPool{dims}d"] = made("AvgPool", dims, (*names, "count_include_pad"), list(counted))
        spread = (
            (*window, dilation) for window, dilation in product(product((2, 3), (1, 2), (0, 1), (False, True)), (1, 2))
        )
        found[f"MaxPool{dims}d"] = made("MaxPool", dims, (*names, "dilation"), list(spread))
        powers = list(product((2,), (2, 3), (1, 2, 3), (False, True)))
        found[f"LPPool{dims}d"] = made("LPPool", dims, ("norm_type", "kernel_size", "stride", "ceil_mode"), powers)
        for kind in ("AdaptiveAvgPool", "AdaptiveMaxPool"):
            found[f"{kind}{dims}d"] = made(kind, dims, ("output_size",), [(1,), (2,), (3,), (5,)])
    return found


class _Norm(nn.Module):
    """A norm of the input with parameters that are not ones and zeros."""

    def __init__(self, function: Callable[..., torch.Tensor], size: tuple[int, ...]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.rand(size, generator=draw) + 0.5)
        self.bias = nn.Parameter(torch.rand(size, generator=draw))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight, self.bias)


_EPS = 1e-6
"""Of `rms_norm`; the default depends on the dtype, which is another one for the reference."""


def _norms() -> dict[str, Iterator[Layer]]:
    def made(dims: int) -> Iterator[Layer]:
        for size in (
            *_sizes(dims),
            (3, 16, 5, 7, 3)[: dims + 2],
            (1, 17, 9, 3, 2)[: dims + 2],
            (5, 4, 1, 3, 2)[: dims + 2],
        ):
            channels = size[1:2]
            functions: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = {
                "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), channels),
                "batch_norm, evaluation": (lambda x, w, b: F.batch_norm(x, b.detach(), w.detach(), w, b), channels),
                "instance_norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), channels),
                "group_norm": (lambda x, w, b: F.group_norm(x, 1, w, b), channels),
                "group_norm by channel": (lambda x, w, b: F.group_norm(x, x.shape[1], w, b), channels),
                "layer_norm": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), size[-1:]),
                "layer_norm of all": (lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b), size[1:]),
                "rms_norm": (lambda x, w, b: F.rms_norm(x, x.shape[-1:], w, _EPS) + b, size[-1:]),
                "local_response_norm": (lambda x, w, b: F.local_response_norm(x, 3) * w[0] + b[0], channels),
                "normalize": (lambda x, w, b: F.normalize(x, dim=1) * w[0] + b[0], channels),
            }
            for name, (function, shape) in functions.items():
                if name.startswith("instance") and size[2:] and torch.Size(size[2:]).numel() == 1:
                    continue
                yield Layer(f"{name} of {size}", lambda f=function, s=shape: _Norm(f, s), size)

    return {f"norms of {dims} dimensions": made(dims) for dims in (1, 2, 3)}


def check_layers(info: LayerInfo) -> list[Result]:
    """Runs all layers of a group as one step; compares results and gradients of inputs and parameters."""
    found = []
    for dtype in (torch.float64, torch.float32):
        modules = [layer.build().to(dtype) for layer in info.layers]
        draw = torch.Generator().manual_seed(0)
        inputs = [torch.randn(layer.size, generator=draw).to(dtype).requires_grad_() for layer in info.layers]

        def step(*inputs: torch.Tensor, modules: list[nn.Module] = modules) -> list[list[torch.Tensor]]:
            results = []
            for x, module in zip(inputs, modules, strict=True):
                y = module(x)
                weights = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape) / y.numel()
                results.append([y.detach(), *torch.autograd.grad((y * weights).sum(), [x, *module.parameters()])])
            return results

        found.append(step(*inputs))
    captured = sidefx_train.compile(step, verify=0)
    have = captured(*inputs)
    reasons = [f"{each.code} {each.reason}" for each in (*captured.report().breaks, *captured.report().fallbacks)]
    if reasons:
        return [Result("inductor", "left", "; ".join(reasons)[:300])]
    for layer, exact, mine in zip(info.layers, found[0], have, strict=True):
        for i, (a, b) in enumerate(zip(exact, mine, strict=True)):
            off = (a - b.double()).norm().item()
            if a.shape != b.shape or not off <= CLOSE * a.norm().item() + CLOSE:
                return [
                    Result("inductor", "differs", f"{layer.name}, {'gradient' if i else 'value'}: off by {off:.3g}")
                ]
    return [Result("inductor", "captured")]
