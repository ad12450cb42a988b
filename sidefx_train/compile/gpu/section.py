"""The device section of a runner: what a CUDA graph records, or why nothing can be recorded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.artifacts import Name, RunnerPlan, TailCall
from sidefx_train.compile.graph.fx_utils import written_args

Role = Literal["static", "written", "input", "number", "unused"]
"""Of an argument of the section: a tensor whose address does not change; one of the caller's that is written, which
must not change its address either; one that is copied to a buffer; a Python number, part of the recording's key; one
that no operation uses."""


@dataclass(frozen=True)
class Section:
    """The part of a runner that runs on the device.

    Attributes:
        names: variables of the runner that it reads, in the order of its arguments.
        roles: role of each.
        escaping: positions of results that leave the step, or that the rest of the runner keeps.
        with_tail: the operations after the graph belong to it.
        waits: positions of the inputs whose copy the host must wait for.
    """

    names: tuple[str, ...]
    roles: tuple[Role, ...]
    escaping: tuple[int, ...]
    with_tail: bool
    waits: frozenset[int] = frozenset()


def learning_rates_on_device(plan: RunnerPlan) -> RunnerPlan:
    """Returns a plan whose fused updates read their learning rate from the scalar buffer.

    A recording would freeze a number. The kernels read it in float32.
    """
    packed = list(plan.packed)

    def moved(call: TailCall) -> TailCall:
        overload = getattr(call.op.overloadpacket, "tensor_lr", None)
        rate = call.kwargs.get("lr")
        if overload is None or overload is call.op or not isinstance(rate, Name) or not _is_number(rate, plan):
            return call
        if rate.text not in packed:
            packed.append(rate.text)
        slot = Name(f"packed[{packed.index(rate.text)}].float()")
        return TailCall(overload, call.args, {**call.kwargs, "lr": slot})

    return replace(plan, tail=tuple(map(moved, plan.tail)), packed=tuple(packed))


def _is_number(value: Name, plan: RunnerPlan) -> bool:
    """Returns True for a number that the host knows before the graph runs."""
    return value.text[0] == "s" or (value.text[0] == "a" and plan.inputs[int(value.text[1:])].kind == "scalar")


def section_of(plan: RunnerPlan, graph: fx.Graph) -> Section:
    """Returns the device section of a plan that :func:`why_not` accepts."""
    unused = set(plan.feeds) - set(_used(plan, graph))
    named = [str(name) for call in plan.tail for name in _names((call.args, tuple(call.kwargs.values())))]
    tail_names = [name.partition("[")[0] for name in named]
    with_tail = not any(name[0] in "l" for name in tail_names)
    written = {f"a{position}" for position in plan.mutated} | {f"b{number}" for number in plan.mutated_bases}
    written |= {target for target, _ in plan.deferred_copies}
    names = dict.fromkeys((*plan.feeds, *(target for target, _ in plan.deferred_copies)))
    if with_tail:
        names |= dict.fromkeys(name for name in tail_names if name[0] != "r")
        written |= {str(name) for call in plan.tail for name in _names(_written(call))}
    unused -= {target for target, _ in plan.deferred_copies} | (set(tail_names) if with_tail else set())
    names = dict.fromkeys(sorted(names, key=_place))  # mostly the list that the runner gets
    roles: tuple[Role, ...] = tuple("unused" if name in unused else _role(plan, name, written) for name in names)
    kept = [*plan.late, *(flag for *_, flag in plan.counters if flag), *(() if with_tail else tail_names)]
    kept_by_runner = {int(name[1:]) for text in kept for name in re.findall(r"\br\d+\b", text)}
    escaping = sorted(plan.escaping | kept_by_runner)
    waiting = {f"a{position}" for position, without_waiting in plan.moved if not without_waiting}
    waits = frozenset(i for i, name in enumerate(names) if name in waiting)
    return Section(tuple(names), roles, tuple(escaping), with_tail, waits)


def _place(name: str) -> float:
    """Returns the number of an input, and more than that for other names."""
    return int(name[1:]) if name[0] == "a" else math.inf


def _role(plan: RunnerPlan, name: str, written: set[str]) -> Role:
    if name == "packed":
        return "static"
    if name.startswith("s"):
        return "number"
    if name.startswith("b"):
        members = plan.bases[int(name[1:])].members
        return "static" if all(plan.inputs[position].kind == "static" for position in members) else "written"
    given = plan.inputs[int(name[1:])]
    if given.kind == "scalar":
        return "number"
    return "static" if given.kind == "static" else "written" if name in written else "input"


def why_not(plan: RunnerPlan, graph: fx.Graph) -> str:
    """Returns why a graph cannot be recorded; empty if it can."""
    if plan.report is not None:
        return "the host reads before the first write whether the step's assumptions hold"
    if plan.metadata_updates:
        return "the step changes the layout of an input in place"
    if not any(node.op == "call_function" for node in graph.nodes) and not plan.tail:
        return "nothing runs on the device"
    for name in _used(plan, graph):
        example = _example(plan, name)
        if example is not None and example.layout != torch.strided:
            return f"{plan.inputs[int(name[1:])].source} is not a strided tensor"
        if example is not None and (example.is_conj() or example.is_neg()):
            return f"{plan.inputs[int(name[1:])].source} is conjugate or negative in memory"
    for node in graph.nodes:
        reason = _why_not_node(node, plan.device)
        if reason:
            return reason
    return ""


def _used(plan: RunnerPlan, graph: fx.Graph) -> Iterator[str]:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for name, node in zip(plan.feeds, placeholders, strict=True):
        if node.users:
            yield name


def _example(plan: RunnerPlan, name: str) -> torch.Tensor | None:
    value = plan.inputs[int(name[1:])].example if name.startswith("a") else None
    return value if isinstance(value, torch.Tensor) else None


_WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "_assert_scalar", "item", "equal")


def waits_for_device(operator: Any) -> bool:
    """Returns True for an operator whose kernel makes the host wait for the device, as the host needs the result."""
    return isinstance(operator, compat.OpOverload) and operator._schema.name.split("::")[1].startswith(_WAITS)


def _why_not_node(node: fx.Node, device: torch.device | None) -> str:
    if not node.users and not written_args(node):
        return ""
    if _is_constant_number(node):  # a replay keeps it
        return ""
    value = node.meta.get("val")
    for each in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(each, torch.Tensor):
            if device is not None and each.device != device:
                what = f"input {node.name}" if node.op == "placeholder" else f"{node.target}"
                return f"{what} is on {each.device}, not on {device}"
            if compat.has_unbacked_sizes(each):
                return f"the size of a result of {node.target} depends on data"
    if node.op == "call_function":
        if waits_for_device(node.target):
            return f"{node.target} makes the host wait for the device"
        if isinstance(node.target, compat.HigherOrderOperator):
            return f"{node.target} chooses on the host what runs"
        if any(isinstance(arg, fx.Node) and arg.op == "get_attr" for arg in node.kwargs.values()):
            return f"{node.target} draws from a generator of the program"
    return ""


def _is_constant_number(node: Any) -> bool:
    """Returns True for a 0-dim constant, which kernels contain as a literal, and for a view of one."""
    if node.target is torch.ops.aten.expand.default and not node.args[1]:
        return _is_constant_number(node.args[0])
    return node.target is torch.ops.aten.full.default and not node.args[0]


def _written(call: Any) -> list[Any]:
    """Returns the arguments that a tail operation writes."""
    arguments = call.op._schema.arguments
    given = dict(zip((each.name for each in arguments), call.args, strict=False)) | call.kwargs
    return [
        given[each.name] for each in arguments if each.alias_info and each.alias_info.is_write and each.name in given
    ]


def _names(value: Any) -> list[Name]:
    """Returns the names in nested arguments."""
    if isinstance(value, Name):
        return [value]
    return [name for item in value for name in _names(item)] if isinstance(value, (list, tuple)) else []
