"""Steps of torch's schedulers that the prologue computes: one capture serves all phases of a schedule.

The step of a scheduler branches on its counters, and each branch would be a capture of its own where tensors are
computed after it (an average of the weights). It depends on numbers alone: those of the schedulers and of the
optimizer's groups. So the prologue runs torch's own code on a copy of them, and the step writes the numbers that this
changes. An error leaves everything as it was: the step is captured again, and raises where eager does.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler, swa_utils

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue
from sidefx_train.compile.capture.shadows.records import InstanceRecord
from sidefx_train.compile.capture.world.symbolic_numbers.host_functions import computes_numbers
from sidefx_train.compile.common.host_programs import PythonCall
from sidefx_train.compile.common.plain_values import PLAIN_TYPES
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import instance_dict, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_COUNTERS = (("last_epoch", "_step_count", "T_cur", "T_i"), ("last_epoch",))
"""Attributes that a step of torch's schedulers may change, besides the list of the last rates; those of a sequence."""

_METHODS = ("step", "get_lr", "_update_lr")
_BETAS = "betas"
_RATES = ("lr", "momentum", _BETAS)
"""Items of an optimizer's group that schedulers write: of ``betas`` the first number. All but the rate are cycled."""

_READ = (*_RATES, "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "min_momentum", "swa_lr")
_ASKED = "_get_lr_called_within_step"
_UNREAD = frozenset({"optimizer", "_schedulers", "_last_lr"})
_NAMES = {module.__name__: vars(module) for module in (lr_scheduler, swa_utils)}
SEQUENCES = tuple(filter(None, (getattr(lr_scheduler, "SequentialLR", None),)))
_CHAINS = tuple(filter(None, (getattr(lr_scheduler, "ChainedScheduler", None),)))
_COMPARING = tuple(filter(None, (getattr(lr_scheduler, "ReduceLROnPlateau", None),)))
"""Classes whose step compares what the graph computes."""

_COMPARED = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter")
"""Attributes that their steps may change, besides the list of the last rates."""


class _Place:
    """The argument at this position, in place of a number that changes."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


class _Scheduler:
    """How to copy a scheduler.

    Attributes:
        cls: its class.
        parts: the schedulers that it steps.
        constants: its attributes that no number of the step is part of.
        changing: the others, with positions.
        counters: names of those that a step may change.
    """

    __slots__ = ("changing", "cls", "constants", "counters", "parts")

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.parts: list[_Scheduler] = []
        self.constants: dict[str, Any] = {}
        self.changing: list[tuple[str, Any]] = []
        self.counters: list[str] = []

    def copied(self, given: tuple[Any, ...], optimizer: _Optimizer, made: list[tuple[_Scheduler, Any]]) -> Any:
        """Returns a copy, and appends it to ``made`` before those of its parts."""
        copy: Any = object.__new__(self.cls)
        made.append((self, copy))
        space = vars(copy)
        space.update(self.constants)
        for name, value in self.changing:
            space[name] = given[value.position] if type(value) is _Place else _filled(value, given)
        space["optimizer"] = optimizer
        if self.parts:
            space["_schedulers"] = [each.copied(given, optimizer, made) for each in self.parts]
        return copy


class _Program:
    """Steps a copy of a scheduler, and returns the numbers that a step may change.

    Args:
        scheduler: the scheduler.
        groups: what schedulers read of the optimizer's groups, with positions.
        written: names of their items that a step may change.
    """

    __slots__ = ("_groups", "_scheduler", "_written")

    def __init__(self, scheduler: _Scheduler, groups: list[dict[str, Any]], written: tuple[str, ...]) -> None:
        self._scheduler, self._written = scheduler, written
        self._groups = [
            (
                {name: value for name, value in group.items() if type(value) is not _Place},
                [(name, value.position) for name, value in group.items() if type(value) is _Place],
            )
            for group in groups
        ]

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        groups = []
        for constants, places in self._groups:
            group = dict(constants)
            for name, place in places:
                group[name] = given[place]
            if _BETAS in group:
                group[_BETAS] = _filled(group[_BETAS], given)
            groups.append(group)
        made: list[tuple[_Scheduler, Any]] = []
        self._scheduler.copied(given, _Optimizer(groups), made).step()
        found: list[Any] = []
        for scheduler, copy in made:
            space = vars(copy)
            last = space.get("_last_lr")
            found += [space[name] for name in scheduler.counters]
            found += [0.0] * len(groups) if last is None else last
            if scheduler.cls in SEQUENCES:
                found += [vars(each).get("_last_lr") is last for each in space["_schedulers"]]
        for group in groups:
            found += [group[name] if name != _BETAS else group[name][0] for name in self._written if name in group]
        return tuple(found)


class _Optimizer:
    """What a scheduler asks of an optimizer that has stepped."""

    _opt_called = True

    class step:
        _wrapped_by_lr_sched = True

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups


class _Reader:
    """Reads what a step of a scheduler depends on.

    Attributes:
        given: the numbers that change, the arguments of the program.
        shadows: the schedulers that were read, each before its parts.
        optimizer: that of all of them.
        warns: one of their functions calls functions of NumPy.
    """

    def __init__(self, world: TraceWorld) -> None:
        self.world, self.interp = world, world.interp
        self.given: list[Any] = []
        self.shadows: list[Any] = []
        self.optimizer: Any = None
        self.warns = False

    def scheduler(self, shadow: Any) -> _Scheduler | None:
        """Returns a scheduler with all that its step reads; ``None`` if that is more than numbers."""
        cls, record = type(shadow), self.world.heap.record_of(shadow)
        known = _NAMES.get(cls.__module__, {}).get(cls.__name__) is cls and issubclass(cls, lr_scheduler.LRScheduler)
        if record is None or not known or cls in _COMPARING or any(each is shadow for each in self.shadows):
            return None
        self.shadows.append(shadow)
        for name in _METHODS:
            self.interp.getattr(shadow, name)  # guarded: the copy runs the class's code
        space, found = instance_dict(record.real), _Scheduler(cls)
        if not self.has_same_optimizer(shadow, space) or (cls not in (*_CHAINS, *SEQUENCES) and _ASKED not in space):
            return None
        for each in self.items(self.interp.getattr(shadow, "_schedulers")) if "_schedulers" in space else ():
            part = self.scheduler(each)
            if part is None:
                return None
            found.parts.append(part)
        found.counters = [name for name in _COUNTERS[cls in SEQUENCES] if name in space and cls not in _CHAINS]
        read = (name for name in space if name not in _UNREAD)
        return found if all(self._attribute(found, shadow, name) for name in read) else None

    def has_same_optimizer(self, shadow: Any, space: dict[str, Any]) -> bool:
        if "optimizer" not in space:
            return self.optimizer is not None
        optimizer = self.interp.getattr(shadow, "optimizer")
        if self.optimizer is None:
            self.optimizer = optimizer
        return optimizer is self.optimizer

    def _attribute(self, found: _Scheduler, shadow: Any, name: str) -> bool:
        value = self._copied(self.interp.getattr(shadow, name))
        if _varies(value):
            found.changing.append((name, value))
        else:
            found.constants[name] = value
        return value is not ABSENT

    def _copied(self, value: Any) -> Any:
        """Returns a value with positions in place of numbers that change; :data:`ABSENT` if it is no data."""
        kind = type(value)
        if kind in (torch.SymInt, torch.SymFloat):
            self.given.append(value)
            return _Place(len(self.given) - 1)
        if kind in PLAIN_TYPES:
            return value
        if kind in (list, tuple):
            items = [self._copied(item) for item in self.items(value)]
            return ABSENT if ABSENT in items else kind(items)
        if not safe_isinstance(value, dict):
            return self._function(value)
        self.world.touch(value, deep=False)  # a `Counter` of milestones, or a dict
        items = [(self._copied(key), self._copied(item)) for key, item in dict.items(value)]
        if any(ABSENT in item or any(map(_varies, item)) for item in items):
            return ABSENT
        made = kind()
        dict.update(made, items)
        return made

    def _function(self, value: Any) -> Any:
        record = self.world.heap.record_of(value)
        real = value if record is None else record.real
        if record is not None and record.base.kind != "const":
            return ABSENT
        inner, given = (
            (real.func, (*real.args, *real.keywords.values())) if type(real) is functools.partial else (real, ())
        )
        if (
            type(inner) is types.FunctionType
            and inner.__module__ in _NAMES
            and all(type(each) in PLAIN_TYPES for each in given)
        ):
            return real
        computes = computes_numbers(self.world, real)
        if computes is None:
            return ABSENT
        self.warns |= computes.warns
        return real

    def items(self, value: Any) -> list[Any]:
        self.world.touch(value, deep=False)
        return list(value)

    def groups(self) -> list[dict[str, Any]] | None:
        """Returns what schedulers read of the optimizer's groups; ``None`` if a rate is a tensor."""
        found = []
        for group in self.interp.call(_read_groups, (self.optimizer, _READ), {}):
            made = {name: self._copied(value) for name, value in group.items()}
            if ABSENT in made.values():
                return None
            found.append(made)
        return found

    def has_stepped(self) -> bool:
        """Returns True if the optimizer has stepped: the scheduler does not warn."""
        step = self.interp.getattr_or(self.optimizer, "step", None)
        wrapped = step is not None and self.interp.getattr_or(step, "_wrapped_by_lr_sched", False) is True
        return wrapped and self.interp.getattr_or(self.optimizer, "_opt_called", False) is True


def step(world: TraceWorld, fn: types.FunctionType, args: tuple[Any, ...]) -> bool:
    """Steps a scheduler by a program of the prologue, or of the epilogue; returns False if it must be interpreted."""
    if world.branching or getattr(type(args[0]), "step", None) is not fn:  # in a branch of `torch.cond`; by `super`
        return False
    if type(args[0]) in _COMPARING:
        return len(args) == 2 and _step_after_graph(world, *args)
    return len(args) == 1 and _step_before_graph(world, args[0])


def _step_before_graph(world: TraceWorld, scheduler: Any) -> bool:
    reader = _Reader(world)
    found = reader.scheduler(scheduler)
    groups = None if found is None or not reader.has_stepped() else reader.groups()
    if found is None or groups is None:
        return False
    nodes = _all(found)
    written = _RATES if any(each.constants.get("cycle_momentum") for each in nodes) else _RATES[:1]
    program = PythonCall(_Program(found, groups, written), f"{type(scheduler).__qualname__}.step", reader.warns)
    made = world.computed_numbers.call(program, tuple(reader.given), {})
    if made is ABSENT:
        return False
    values = iter(made)
    results = [_Result(each, shadow, len(groups), values) for each, shadow in zip(nodes, reader.shadows, strict=True)]
    _write(world, results[0], dict(zip(map(id, nodes), results, strict=True)))
    rates = [[(name, next(values)) for name in written if name in group] for group in groups]
    world.interp.call(_write_groups, (reader.optimizer, rates), {})
    return True


def _step_after_graph(world: TraceWorld, scheduler: Any, metric: Any) -> bool:
    """Steps a scheduler that compares what the graph computes: the epilogue does, before it changes any object."""
    reader, record = _Reader(world), world.heap.record_of(scheduler)
    if record is None or not safe_isinstance(record, InstanceRecord) or record.written or record.shared:
        return False
    space = instance_dict(record.real)
    known = space.keys() >= {"optimizer", "min_lrs", "_last_lr", *_COMPARED} and _is_metric(world, metric)
    if not known or not reader.has_same_optimizer(scheduler, space):
        return False
    groups = reader.groups()
    if groups is None or len(groups) != len(reader.items(world.interp.getattr(scheduler, "min_lrs"))):
        return False
    rates = [_filled(group["lr"], tuple(reader.given)) for group in groups]
    made = world.defer_for_result(_step_copy, (scheduler, metric, tuple(rates)), {})
    values = [DeferredValue(operator.getitem, (made, i)) for i in range(len(_COMPARED) + len(rates))]
    for name, value in zip(_COMPARED, values, strict=False):
        world.interp.setattr(scheduler, name, value)
    rates = values[len(_COMPARED) :]
    world.interp.setattr(scheduler, "_last_lr", list(rates))
    world.interp.call(_write_groups, (reader.optimizer, [[("lr", rate)] for rate in rates]), {})
    return True


def _is_metric(world: TraceWorld, value: Any) -> bool:
    """Returns True for what ``float`` converts without an error or a warning."""
    if type(value) is not compat.FakeTensor:
        return type(value) in (int, float, torch.SymInt, torch.SymFloat)
    one = type(value.numel()) is int and value.numel() == 1 and not value.dtype.is_complex
    return one and not value.requires_grad and world.tracer.has_node(value)


def _step_copy(scheduler: Any, metric: Any, rates: tuple[Any, ...]) -> tuple[Any, ...]:
    """Steps a copy of a scheduler, and returns what that changes."""
    copy = object.__new__(type(scheduler))
    vars(copy).update(vars(scheduler), optimizer=_Optimizer([{"lr": rate} for rate in rates]))
    copy.step(metric)
    return (*(vars(copy)[name] for name in _COMPARED), *copy._last_lr)


class _Result:
    """What the program returns for one scheduler.

    Attributes:
        node: the scheduler.
        shadow: its shadow.
        counters: values of its counters.
        rates: the last rates, for a list of its own.
        steps: for each of its parts, whether a sequence steps that one.
    """

    def __init__(self, node: _Scheduler, shadow: Any, groups: int, values: Iterator[Any]) -> None:
        self.node, self.shadow = node, shadow
        self.counters = [next(values) for _ in node.counters]
        self.rates: Any = [next(values) for _ in range(groups)]
        self.steps = [next(values) if node.cls in SEQUENCES else True for _ in node.parts]


def _write(world: TraceWorld, result: _Result, results: dict[int, _Result]) -> Any:
    """Writes the attributes of a scheduler that steps, and of those that it steps; returns its list of rates."""
    rates = result.rates
    for part, steps in zip(result.node.parts, result.steps, strict=True):
        if steps:
            last = _write(world, results[id(part)], results)
            rates = last if result.node.cls in SEQUENCES else rates
    for name, value in zip(result.node.counters, result.counters, strict=True):
        world.interp.setattr(result.shadow, name, value)
    world.interp.setattr(result.shadow, "_last_lr", rates)
    return rates


def _read_groups(optimizer: Any, names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]


def _write_groups(optimizer: Any, rates: list[list[tuple[str, Any]]]) -> None:
    for group, values in zip(optimizer.param_groups, rates, strict=True):
        for name, value in values:
            group[name] = (value, *group[name][1:]) if name == "betas" else value


def _all(scheduler: _Scheduler) -> list[_Scheduler]:
    return [scheduler, *(each for part in scheduler.parts for each in _all(part))]


def _varies(value: Any) -> bool:
    return type(value) is _Place or (type(value) in (list, tuple) and any(map(_varies, value)))


def _filled(value: Any, given: tuple[Any, ...]) -> Any:
    kind = type(value)
    if kind is _Place:
        return given[value.position]
    return kind(_filled(item, given) for item in value) if kind in (list, tuple) else value
