"""``torch.equal`` and ``torch.allclose``: Python booleans that depend on data and exist after the graph has run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.world.symbolic_numbers.scalar_tensors import host_value
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def _comparable(values: tuple[Any, ...]) -> bool:
    """Returns True for two tensors of the trace with the same dtype, device and shape."""
    if len(values) != 2 or not all(type(value) is compat.FakeTensor for value in values):
        return False
    one, two = values
    return one.dtype == two.dtype and one.device == two.device and tuple(one.shape) == tuple(two.shape)


@registry.intercept(torch.equal, torch.Tensor.equal)
def equal(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or not _comparable(args):
        return ABSENT
    return _number(world, torch.eq(*args).all())


@registry.intercept(torch.Tensor.__contains__)
def contains(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns True if a number is among the elements of a tensor; leaves it to torch unless that is known before."""
    tensor, item = args
    if type(tensor) is not compat.FakeTensor or type(item) not in (bool, int, float, torch.SymInt, torch.SymFloat):
        return ABSENT
    found = world.guarded(torch.any, (world.guarded(torch.eq, (tensor, item), {}),), {})
    known = host_value(world, found)
    return ABSENT if known is None else known


def _number(world: TraceWorld, tensor: torch.Tensor) -> Any:
    known = host_value(world, tensor)
    return tensor.item() if known is None else known


@registry.intercept(torch.allclose, torch.Tensor.allclose)
def allclose(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _comparable(args[:2]):
        return ABSENT
    return torch.isclose(*args, **kwargs).all().item()
