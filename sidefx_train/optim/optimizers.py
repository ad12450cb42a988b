"""Optimizers during a capture: hyperparameters are inputs, and state exists before the first step.

The capture runs ``torch.optim``. Two rules make its first step equal to its thousandth. Floats below ``param_groups``
are graph inputs (a scheduler never causes a recapture). State that ``_init_group`` would create in the first step is
created before the trace, on copies of the parameters, and committed only when the captured step is about to run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord
from sidefx_train.compile.capture.shadows.records import InstanceRecord, LeafRecord, TensorRecord
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import instance_dict

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

registry.SYMBOLIC_FLOATS.append((Optimizer, "param_groups"))
registry.STATIC_ATTRIBUTES.append((Optimizer, "state"))
registry.STATIC_ATTRIBUTES.append((Optimizer, "param_groups"))
registry.READ_ON_HOST.append((torch.optim.ASGD, "state"))
registry.STATIC_ATTRIBUTES.append((torch.nn.Module, "_parameters"))
registry.STATIC_ATTRIBUTES.append((torch.nn.Module, "_buffers"))


@registry.intercept(torch.autograd.profiler.record_function)
def _no_profiler_range(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Skips profiler ranges, which mark eager steps; a graph has none."""
    return contextlib.nullcontext()


@registry.intercept_method(Optimizer, "_init_group")
def _state_before_the_trace(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Creates missing optimizer state on copies, then lets ``_init_group`` run as usual.

    With tensor subclasses among the parameters it is created in the step: that runs Python of theirs. So it is for a
    class with an ``_init_group`` of its own, which may have side effects.
    """
    record = world.heap.record_of(args[0])
    if not isinstance(record, InstanceRecord) or len(args) < 2 or not _is_torchs(type(record.real)._init_group):
        return ABSENT
    group = args[1]
    params = world.interp.iterate(world.interp.call(dict.__getitem__, (group, "params"), {}))
    state = world.instance_attr(args[0], "state")
    state_record = world.heap.dict_record(state)
    if state_record is None or state_record.filled:
        return ABSENT
    missing = [
        p
        for p in map(world.heap.record_of, params)
        if isinstance(p, (TensorRecord, LeafRecord)) and _lacks(state_record, p)
    ]
    if not missing or any(compat.is_wrapper(p) for held in record.real.param_groups for p in held["params"]):
        return ABSENT
    made, flags = _first_step(record.real, _real_group(world, group), missing)
    _settle_flags(world, record, flags)
    if not made:
        return ABSENT
    merged = defaultdict(dict, state_record.real)
    merged.update(made)
    state_record.real = merged
    optimizer = record.real

    def commit() -> None:
        for param, entries in made.items():
            optimizer.state[param] = entries

    def undo() -> None:
        for param in made:
            optimizer.state.pop(param, None)

    world.pending_state.append((commit, undo))
    return ABSENT


def _is_torchs(function: Any) -> bool:
    return str(function.__module__).startswith("torch.optim.")


def _real_group(world: TraceWorld, group: Any) -> dict[str, Any]:
    """Returns the real group of a shadow."""
    record = world.heap.dict_record(group)
    return dict(record.real if record is not None else group)


def _settle_flags(world: TraceWorld, record: InstanceRecord, flags: dict[str, bool]) -> None:
    """Clears flags before the first run that the first step would clear (checks made once)."""
    optimizer = record.real
    before = {name: vars(optimizer)[name] for name in flags}
    for name, value in flags.items():
        world.heap.guard("is", world.heap.sources.attr(record.base, name), value)
        vars(record.shadow)[name] = record.snapshot[name] = value
    if flags:
        world.pending_state.append((lambda: vars(optimizer).update(flags), lambda: vars(optimizer).update(before)))


def _lacks(state: DictRecord, param: TensorRecord | LeafRecord) -> bool:
    param.heap.read_grad(param.shadow)
    grad = param.shadow.grad
    if grad is None or grad.is_sparse or param.shadow in state.shadow or param.shadow in state.missing:
        return False  # with a sparse gradient, the first step is another graph
    return not state.real.get(param.real)


def _first_step(
    optimizer: Optimizer, group: dict[str, Any], params: list[TensorRecord | LeafRecord]
) -> tuple[dict[Any, dict[str, Any]], dict[str, bool]]:
    """Returns what the first step would leave in the optimizer: state by real parameter, and the flags it clears."""
    init = type(optimizer)._init_group
    lists: list[list[Any]] = [[] for _ in range(len(inspect.signature(init).parameters) - 2)]
    with compat.real_world(), torch.no_grad():
        copies = {}
        for record in params:
            copied = torch.nn.Parameter(record.real.detach(), requires_grad=record.real.requires_grad)
            copied.grad = record.real.detach()
            copies[copied] = record.real
        standin = object.__new__(type(optimizer))
        instance_dict(standin).update(instance_dict(optimizer), state=defaultdict(dict))
        init(standin, {**group, "params": list(copies)}, *lists)
        made = {copies[copied]: dict(entries) for copied, entries in standin.state.items() if entries}
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0 and group["dampening"] == 0:
            # The first step sets the buffer to the gradient: the same as one update of negative zeros, which
            # keep the sign of a gradient that is zero.
            for real in copies.values():
                buffer = torch.zeros_like(real, memory_format=torch.preserve_format).neg()
                if not group["fused"]:  # eager's is new after the first step, this one has been written twice
                    compat.set_version(buffer, compat.VERSIONS - 2)
                made[real] = {"momentum_buffer": buffer}
        flags = {
            name: value
            for name, value in vars(standin).items()
            if type(value) is bool and vars(optimizer).get(name, value) is not value
        }
    return made, flags


_FUSED_NAMES = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
FUSED_UPDATES = tuple(getattr(torch, name) for name in _FUSED_NAMES if hasattr(torch, name))


def _fused_update(world: TraceWorld, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a fused update with symbolic hyperparameters: its schema takes plain doubles, which would specialize
    them."""
    numbers = {name: value for name, value in kwargs.items() if isinstance(value, torch.SymFloat)}
    for value in (*args, *kwargs.values()):
        world.touch(value)
    plain = {name: compat.hint_of(value) if name in numbers else value for name, value in kwargs.items()}
    result = world.guarded(fn, args, plain)
    node = world.tracer.last_node()
    node.kwargs = {**node.kwargs, **{name: world.tracer.node_of(value) for name, value in numbers.items()}}
    return result


def _register_fused(fn: Any) -> None:
    @registry.intercept(fn)
    def handler(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _fused_update(world, fn, args, kwargs)


for _update in FUSED_UPDATES:
    _register_fused(_update)
