"""How far rounding moves the results of a captured graph: it is run op by op with noise on every operation.

Two right programs differ by how they round. How much that shows in a result depends on the result: where a sum cancels,
or a value lies at the edge of a clamp, it can be all of it. A run in which each operation's result is moved by a little
random noise of the size of a rounding error shows what such differences come to. Source: Parker, Pierce and Eggert,
*Monte Carlo arithmetic: how to gamble with floating point and win*, Computing in Science & Engineering 2 (4), 2000.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from sidefx_train import _torch_compat as compat
from sidefx_train.compile.artifacts import TracedGraph
from sidefx_train.compile.graphs import for_any_layout

aten = torch.ops.aten

_ROUNDINGS = {torch.float16: 1.0, torch.bfloat16: 1.0}
"""Size of the noise in rounding errors, by dtype."""

_OTHERS = 16.0
"""That of any other dtype: sums of some length make as much of rounding errors."""

_EXACT = (
    aten.clone.default, aten.copy_.default, aten.cat.default, aten.stack.default, aten.where.self,
    aten.constant_pad_nd.default, aten.index_select.default, aten.gather.default, aten.embedding.default,
    aten.neg.default, aten.relu.default, aten.flip.default, aten.roll.default, aten.fill_.Scalar, aten.zero_.default,
)  # fmt: skip
"""Operations that compute nothing that is rounded."""


def noisy_run(traced: TracedGraph, args: list[Any], seed: int) -> Sequence[Any]:
    """Runs a captured graph op by op, the result of each operation moved by noise.

    Args:
        traced: the captured graph.
        args: its inputs, which it may write to.
        seed: of the noise.

    Returns:
        The graph's outputs.
    """
    module = for_any_layout(traced.module) if traced.gradients else traced.module
    with torch.no_grad(), compat.training_kernels():
        return list(Noisy(module, seed).run(*args))


class Noisy(fx.Interpreter):
    """Runs a graph with noise on every operation that rounds.

    Args:
        module: the graph.
        seed: of the noise.
        functions: what is called instead of some of its operators.
    """

    def __init__(
        self, module: fx.GraphModule, seed: int, functions: Mapping[Any, Callable[..., Any]] | None = None
    ) -> None:
        super().__init__(module)
        self._draw = torch.Generator().manual_seed(seed)
        self._functions = functions or {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(self._functions.get(target, target), args, kwargs)
        if _rounds(target) and any(map(_is_float, _tensors((args, kwargs)))):
            for tensor in _tensors(result):
                self._move(tensor)
        return result

    def _move(self, tensor: torch.Tensor) -> None:
        overlaps = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if not _is_float(tensor) or tensor.numel() == 0 or overlaps:
            return
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        finite = torch.nan_to_num(plain.detach().double(), 0.0, 0.0, 0.0)
        size = torch.finfo(tensor.dtype).eps * _ROUNDINGS.get(tensor.dtype, _OTHERS)
        noise = torch.rand(plain.shape, generator=self._draw, dtype=torch.float64).to(plain.device) * 2 - 1
        plain.add_((noise * size * (finite.abs() + finite.square().mean().sqrt())).to(plain.dtype))


def _rounds(target: Any) -> bool:
    if not isinstance(target, compat.OpOverload) or target in _EXACT or torch.Tag.inplace_view in target.tags:
        return False
    returns = target._schema.returns
    return not any(each.alias_info is not None and not each.alias_info.is_write for each in returns)  # no view


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []
