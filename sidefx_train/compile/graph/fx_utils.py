"""Reads and writes of FX nodes from operator schemas; what passes read, insert and erase."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat

_UNANNOTATED_WRITES: dict[str, tuple[int, ...]] = {
    # operators that write arguments which their schema calls read-only: (positions), if `training` is true
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
}
_TRAINING_FLAG = 5


def node_args(value: Any) -> list[fx.Node]:
    """Returns the nodes inside nested arguments, in order."""
    found: list[fx.Node] = []

    def keep(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.map_arg(value, keep)
    return found


def schema_args(node: fx.Node) -> list[tuple[Any, Any]]:
    """Returns (schema argument, value) for every passed argument."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    pairs = list(zip(arguments, node.args, strict=False))
    by_name = {a.name: a for a in arguments}
    pairs += [(by_name[k], v) for k, v in node.kwargs.items() if k in by_name]
    return pairs


def generators(module: fx.GraphModule) -> list[torch.Generator]:
    """Returns the random generators, other than torch's own, that the graph draws from."""
    held = [getattr(module, str(node.target)) for node in module.graph.nodes if node.op == "get_attr"]
    return [constant for constant in held if isinstance(constant, torch.Generator)]


def one_generator(a: torch.Generator, b: torch.Generator) -> bool:
    """Returns True if two objects share one generator: it is seeded temporarily. Torch creates such objects freely."""
    before, other = a.get_state(), b.get_state()
    if a is b or not torch.equal(before, other):
        return a is b
    a.manual_seed(a.initial_seed() ^ 1)
    same = a.initial_seed() == b.initial_seed()
    a.set_state(before)
    return same


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Copies the nodes of a module, so that either can be changed without the other."""
    graph = fx.Graph()
    last = graph.output(graph.graph_copy(module.graph, {}))
    last.meta = dict(next(iter(reversed(module.graph.nodes))).meta)
    made = compat.late_module(module, graph)
    made.meta = dict(module.meta)
    return made


def written_args(node: fx.Node) -> list[fx.Node]:
    """Returns the tensor arguments that the node writes in place."""
    if node.op != "call_function" or not isinstance(node.target, compat.OpOverload):
        return []
    found: list[fx.Node] = []
    for schema_arg, value in schema_args(node):
        if schema_arg.alias_info is not None and schema_arg.alias_info.is_write:
            found += node_args(value)
    hidden = _UNANNOTATED_WRITES.get(node.target._schema.name)
    if hidden and bool(node.args[_TRAINING_FLAG]):
        for position in hidden:
            found += node_args(node.args[position])
    return found


def emit(graph: fx.Graph, fake_mode: Any, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Inserts a call into ``graph``, with its value on fake tensors."""
    made = graph.call_function(op, args, kwargs)
    values = fx.map_arg((args, kwargs), lambda used: used.meta["val"])
    with fake_mode, torch.no_grad():
        made.meta["val"] = op(*values[0], **values[1])
    return made


def static_cpu_shape(value: Any, dtype: torch.dtype | None = None) -> list[int] | None:
    """Returns the static sizes of a node's CPU tensor; ``None`` for another device, another ``dtype``, symbolic sizes,
    or if ``value`` is no node with a tensor."""
    fake = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(fake, torch.Tensor) or fake.device.type != "cpu" or dtype not in (None, fake.dtype):
        return None
    return list(fake.shape) if all(isinstance(size, int) for size in fake.shape) else None


def erase_unused(node: fx.Node) -> None:
    """Erases a call that nothing uses, and then those of its inputs that only it used."""
    if node.op != "call_function" or node.users:
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for each in inputs:
        erase_unused(each)
