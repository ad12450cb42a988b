"""Rebuilds tensor subclasses that the step created: DTensors, jagged tensors, wrappers."""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.freed_history import is_freed
from sidefx_train.compile.residual.autograd_nodes import freed_result
from sidefx_train.compile.residual.reconstruct.attributes import fill_attributes
from sidefx_train.compile.residual.reconstruct.reconstruction import Reconstruction
from sidefx_train.compile.residual.wrapper_outputs import WrapperLayout


def dtensor(rebuilder: Reconstruction, value: Any) -> str:
    """Returns a ``DTensor`` that the step created, over its local tensor."""
    if value.grad_fn is not None or value.grad is not None:
        rebuilder.refuse("SFX107", "a DTensor with a gradient or an autograd history leaves the step")
    maker, spec = rebuilder.constant(compat.make_dtensor), rebuilder.constant(compat.spec_of(value), "spec")
    local = rebuilder.expression(compat.local_of(value))
    name = rebuilder.remember(value, f"{maker}({local}, {spec}, {value.requires_grad})")
    _count_writes(rebuilder, value, name)
    return name


def wrapper(rebuilder: Reconstruction, value: Any) -> str:
    """Returns a wrapper subclass that the step created, with its attributes; none of its class's Python runs."""
    heap, kind = rebuilder.world.heap, type(value).__qualname__
    history = value.grad_fn
    live = history is not None and not is_freed(rebuilder.world.freed, history)
    if value.is_inference() or (value._is_view() and not live):
        heap.refuse("SFX107", f"a {kind}, a tensor subclass that is a view, leaves the step")
    storage = compat.storage_id(value)
    if any(compat.storage_id(other) == storage for other in _wrappers_around(rebuilder, value)):
        heap.refuse("SFX107", f"a {kind}, a tensor subclass that shares storage with another, leaves the step")
    if live:
        return _differentiable_wrapper(rebuilder, value, kind)
    leaf = history is None and value.requires_grad
    layout = (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, leaf)
    maker, cls = rebuilder.constant(compat.make_wrapper), rebuilder.constant(type(value))
    arguments = f"{cls}, {', '.join(map(rebuilder.expression, layout))}"
    if history is None:
        name = rebuilder.remember(value, f"{maker}({arguments})")
    else:
        node = rebuilder.constant(type(history).__name__)
        name = rebuilder.remember(value, f"{rebuilder.constant(freed_result)}({node}, {maker}, {arguments})")
    fill_attributes(rebuilder, name, value)
    _count_writes(rebuilder, value, name)
    return rebuilder.with_gradient(value, name)


def _differentiable_wrapper(rebuilder: Reconstruction, value: Any, kind: str) -> str:
    """Returns a wrapper with a history: the joint graph makes it, its attributes are set here."""
    if WrapperLayout.of(value) is None:
        reason = f"a {kind}, a tensor subclass with an autograd history, leaves the step"
        rebuilder.refuse("SFX107", f"{reason}, and holds something else than tensors and plain values")
    if value.retains_grad:
        rebuilder.refuse("SFX107", f"a {kind}, a tensor subclass that retains its gradient, leaves the step")
    take = rebuilder.constant(rebuilder.shells.take, "shell")
    name = rebuilder.remember(value, f"{take}({len(rebuilder.shells.values)})")
    rebuilder.shells.values.append(value)
    fill_attributes(rebuilder, name, value)
    _count_writes(rebuilder, value, name)
    return name


def _wrappers_around(rebuilder: Reconstruction, value: Any) -> list[Any]:
    """Returns the wrapper subclasses from outside, and those that leave the step too, other than ``value``."""
    outside = [record.shadow for record in rebuilder.world.heap.by_real.values()]
    return [each for each in (*outside, *rebuilder.kept) if each is not value and compat.is_wrapper(each)]


def _count_writes(rebuilder: Reconstruction, value: torch.Tensor, name: str) -> None:
    """Gives a new object the version counter that it has in eager."""
    if not value.is_inference() and value._version:
        rebuilder.write(f"{rebuilder.constant(compat.count_writes)}({name}, {value._version})")


def jagged(rebuilder: Reconstruction, value: Any) -> str:
    """Returns a jagged tensor over its values and offsets."""
    rebuilder.jagged.check(value)
    name = rebuilder.remember(value, rebuilder.jagged.made(value))
    _count_writes(rebuilder, value, name)
    return rebuilder.with_gradient(value, name)
