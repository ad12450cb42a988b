"""Rebuilds plain tensors, parameters, numbers that the graph computes, random states, and handles of hooks."""

from __future__ import annotations

import functools
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.dispatch_mode import RandomState
from sidefx_train.compile.capture.shadows.deferred_values import TensorSnapshot
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.residual.reconstruct.attributes import fill_attributes
from sidefx_train.compile.residual.reconstruct.instances import new_instance
from sidefx_train.compile.residual.reconstruct.reconstruction import Reconstruction


def new_tensor(rebuilder: Reconstruction, value: torch.Tensor) -> str:
    """Returns a tensor that the step created, with its attributes and gradient."""
    if value.is_sparse:
        return _new_sparse(rebuilder, value)
    rebuilder.jagged.check(value)
    if any(compat.hook_numbers(value)) and value.is_leaf:
        rebuilder.refuse("SFX111", "leaves a hook registered on a leaf that it creates")
    made = rebuilder.remember(value, _marked(rebuilder, value, rebuilder.tensor(value)))
    rebuilder.fill(functools.partial(_tag, rebuilder, value, made))
    return rebuilder.with_gradient(value, made)


def _new_sparse(rebuilder: Reconstruction, value: torch.Tensor) -> str:
    """Returns a sparse tensor that the step created."""
    if value.requires_grad or any(compat.hook_numbers(value)):
        rebuilder.refuse("SFX109", "a sparse tensor with an autograd history, or with a hook, leaves the step")
    made = rebuilder.remember(value, sparse_tensor(rebuilder, value))
    if value._version:
        rebuilder.write(f"{rebuilder.constant(compat.count_writes)}({made}, {value._version})")
    rebuilder.fill(functools.partial(_tag, rebuilder, value, made))
    return made


def sparse_tensor(rebuilder: Reconstruction, value: torch.Tensor) -> str:
    """Returns code that makes a sparse tensor of its indices and values."""
    rows = rebuilder.world.tracer.proxy_mode.sparse.rows(value)
    if rows is None:
        rebuilder.refuse("SFX109", f"an output has layout {value.layout}")
    parts = ", ".join(map(rebuilder.expression, (rows.indices, rows.values)))
    size = rebuilder.constant(tuple(value.shape), "size")
    how = "" if rows.coalesced is None else f", is_coalesced={rows.coalesced}"
    return f"{rebuilder.constant(torch.sparse_coo_tensor)}({parts}, {size}{how}, check_invariants=False)"


def _marked(rebuilder: Reconstruction, value: torch.Tensor, expression: str) -> str:
    """Returns a tensor as the parameter, buffer or instance of a subclass that the step made of it."""
    shown = rebuilder.world.heap.shown.of(value)
    if shown is not None:
        return f"{rebuilder.constant(compat.with_class)}({expression}, {rebuilder.constant(shown.cls)})"
    if safe_isinstance(value, torch.nn.Parameter):
        return f"{rebuilder.constant(torch.nn.Parameter, 'Parameter')}({expression}, {value.requires_grad})"
    if safe_isinstance(value, torch.nn.Buffer):
        persistent = getattr(value, "persistent", True)
        return f"{rebuilder.constant(torch.nn.Buffer, 'Buffer')}({expression}, persistent={persistent})"
    return expression


def number(rebuilder: Reconstruction, value: Any) -> str:
    """Returns a symbolic number: read from an input, or a result of the graph."""
    if compat.is_ragged_size(value):
        return rebuilder.remember(value, rebuilder.jagged.ragged_size(value))
    of_numpy = rebuilder.world.heap.numbers.of_numpy.get(id(value)) if compat.numpy_class(value) else None
    if of_numpy is not None:
        return rebuilder.writer.value(of_numpy[0])
    for known, source, _ in rebuilder.world.heap.numbers.inputs:
        if known is value:
            return rebuilder.writer.value(source)
    constant = value.node.maybe_as_int() if safe_isinstance(value, torch.SymInt) else None
    if constant is not None:
        return rebuilder.constant(constant)
    return rebuilder.output(rebuilder.world.tracer.node_of(value))


def snapshot(rebuilder: Reconstruction, snapshot: TensorSnapshot) -> str:
    """Returns a tensor with the value that it had at some node of the graph."""
    node = snapshot.node
    moved = compat.storage_id(snapshot.fake) != compat.storage_id(node.meta["val"])
    if moved or len(rebuilder.world.writes.to(snapshot.fake)) != snapshot.writes:
        held = rebuilder.output(rebuilder.world.tracer.clone_after(snapshot.fake, node, snapshot.after))
        if safe_isinstance(snapshot.fake, (torch.nn.Parameter, torch.nn.Buffer)):
            return _marked(rebuilder, snapshot.fake, held)
        return rebuilder.with_autograd(snapshot.fake, held)
    return rebuilder.expression(snapshot.fake)


def _tag(rebuilder: Reconstruction, value: torch.Tensor, expression: str) -> None:
    """Sets the attributes that the step set on a tensor."""
    shown = rebuilder.world.heap.shown.of(value)
    if shown is not None:
        fill_attributes(rebuilder, expression, shown.attributes)
    _, names = rebuilder.world.tagged.get(id(value), (value, {}))
    for name in names:
        if name in vars(value):  # not deleted again
            rebuilder.write(f"{expression}.{name} = {rebuilder.expression(vars(value)[name])}")


def hook_handle(rebuilder: Reconstruction, value: Any) -> str:
    """Returns the handle of a hook; of one on a tensor that the step leaves registered, the handle that it gets."""
    left, number = rebuilder.world.left_hooks, vars(value).get("id")
    if number in left.handles:
        return rebuilder.expression(left.handles[number])
    if left.is_registered(number) and not rebuilder.world.specialization.native_backward:
        left.wants_native = True
        rebuilder.refuse("SFX107", "the handle of a hook that runs in the backward of an output leaves the step")
    return new_instance(rebuilder, value)


def random_state(rebuilder: Reconstruction, value: RandomState) -> str:
    """Returns a random state that the step has saved: the state after the graph, if nothing was drawn in between."""
    world = rebuilder.world
    drawn = world.tracer.proxy_mode.draws(value.kind)
    if value.kind != "cpu" or value.position < len(drawn) or world.random_draws.of_torch.calls:
        rebuilder.refuse("SFX110", "cannot rebuild a random state saved in the middle of the step")
    return rebuilder.remember(value, f"{rebuilder.constant(torch.random.get_rng_state)}()")
