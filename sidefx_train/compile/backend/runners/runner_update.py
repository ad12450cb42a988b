"""Generates the update after the graph: one native call if the tensors allow it, torch's own operators otherwise."""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train.compile.backend.runners.runner_source import RunnerSource, argument_text, tuple_text
from sidefx_train.compile.gpu.multi_tensor import MULTI_TENSOR_UPDATE, MultiTensorUpdate
from sidefx_train.compile.graph.artifacts import Name, RunnerPlan, TailCall
from sidefx_train.compile.graph.strided_layout import is_dense, is_static
from sidefx_train.compile.native import native_module

aten = torch.ops.aten


def write_tail(graph: RunnerPlan, source: RunnerSource) -> None:
    """Writes the lines of every tail operation."""
    calls = list(graph.tail)
    native = native_module() if calls else None
    i = 0
    while i < len(calls):
        call = calls[i]
        if call.op is MULTI_TENSOR_UPDATE:
            written, read, expression, sizes = call.args
            update = source.bind(f"update{i}", MultiTensorUpdate(expression, sizes))
            source(f"{update}({argument_text(written, source)}, {argument_text(read, source)})")
            i += 1
            continue
        following = calls[i + 1] if i + 1 < len(calls) else None
        if native is not None and following is not None and _increments_steps_of(call, following):
            lines = _native_update(graph, following, source, float(call.args[1]))
            if lines is not None:
                source.bind("native", native)
                source(lines)
                source(f"increment_versions({tuple_text([str(name) for name in call.args[0]])})")
                i += 2
                continue
        line = _native_update(graph, call, source, 0.0) if native is not None else None
        if line is not None:
            source.bind("native", native)
            source(line)
        else:
            args = [argument_text(a, source) for a in call.args]
            args += [f"{k}={argument_text(v, source)}" for k, v in call.kwargs.items()]
            source(f"{source.bind(f'tail{i}', call.op)}({', '.join(args)})  # {call.op}")
        i += 1


def _arguments(call: TailCall) -> dict[str, Any]:
    names = [a.name for a in call.op._schema.arguments]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def _increments_steps_of(call: TailCall, following: TailCall) -> bool:
    if call.op is not aten._foreach_add_.Scalar or not isinstance(call.args[1], (int, float)):
        return False
    steps = _arguments(following).get("state_steps")
    return steps is not None and [str(n) for n in steps] == [str(n) for n in call.args[0]]


class _Tensors:
    """Metadata of the tensors in a tail call."""

    def __init__(self, graph: RunnerPlan) -> None:
        self.graph = graph

    def of(self, name: Name) -> torch.Tensor | None:
        index = int(name.text[1:])
        value = self.graph.inputs[index].example if name.text[0] == "a" else self.graph.results[index]
        return value if isinstance(value, torch.Tensor) else None

    def same_layout(self, groups: list[list[Name]]) -> list[int] | None:
        """Returns element counts if the i-th tensors of all groups are dense float32 CPU tensors of one layout."""
        sizes = []
        for row in zip(*groups, strict=True):
            tensors = [self.of(n) for n in row]
            first = tensors[0]
            for t in tensors:
                if t is None or first is None or t.dtype != torch.float32 or t.device.type != "cpu":
                    return None
                if t.shape != first.shape or t.stride() != first.stride() or not (is_static(t) and is_dense(t)):
                    return None
            assert first is not None, "a row has tensors"
            sizes.append(first.numel())
        return sizes


def _native_update(graph: RunnerPlan, call: TailCall, source: RunnerSource, increment: float) -> str | None:
    """Returns source of one native call, or ``None`` if it does not support this update."""
    name = call.op._schema.name
    given = _arguments(call)
    if given.get("grad_scale") is not None or given.get("found_inf") is not None or call.op._overloadname != "default":
        return None
    tensors = _Tensors(graph)
    threads = "get_num_threads()"

    def group(key: str) -> str:
        return tuple_text([str(n) for n in given[key]])

    def number(key: str) -> str:
        return argument_text(given[key], source)

    if name in ("aten::_fused_adam_", "aten::_fused_adamw_"):
        keys = ["self", "grads", "exp_avgs", "exp_avg_sqs"] + (["max_exp_avg_sqs"] if given["amsgrad"] else [])
        sizes = tensors.same_layout([given[k] for k in keys])
        steps = tensors.same_layout([given["state_steps"]])
        if sizes is None or steps is None or len(steps) != len(sizes) or any(s != 1 for s in steps):
            return None
        total = sum(sizes)
        numbers = ", ".join(number(k) for k in ("lr", "beta1", "beta2", "weight_decay", "eps"))
        lists = ", ".join(
            group(k) for k in ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")
        )
        flags = f"{increment}, {name == 'aten::_fused_adamw_'}, {given['amsgrad']}, {given['maximize']}"
        sizes_name = source.bind(f"sizes{len(source.globals)}", tuple(sizes))
        return f"native.adam({sizes_name}, {lists}, {flags}, {numbers}, {threads if total >= 65536 else 1})"
    if name == "aten::_fused_sgd_" and increment == 0.0:
        keys = ["self", "grads"] + (["momentum_buffer_list"] if given["momentum_buffer_list"] else [])
        sizes = tensors.same_layout([given[k] for k in keys])
        if sizes is None:
            return None
        lists = ", ".join(group(k) for k in ("self", "grads", "momentum_buffer_list"))
        flags = f"{given['nesterov']}, {given['maximize']}, {given['is_first_step']}"
        numbers = ", ".join(number(k) for k in ("lr", "momentum", "weight_decay", "dampening"))
        sizes_name = source.bind(f"sizes{len(source.globals)}", tuple(sizes))
        return f"native.sgd({sizes_name}, {lists}, {flags}, {numbers}, {threads if sum(sizes) >= 65536 else 1})"
    return None
