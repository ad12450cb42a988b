"""Moves a captured graph to another device: the graph is run again on fake tensors of that device.

The backward is in the graph already, so no autograd is needed, which fake tensors of an absent device do not support.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.functionalization.optimizer_tail import is_fused_update
from sidefx_train.compile.gpu.simulation.device_operators import CPU_ONLY, DEVICE_OPERATORS
from sidefx_train.compile.graph.artifacts import GraphInput, TracedGraph, is_scalar
from sidefx_train.compile.graph.fx_utils import node_args

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")

_COUNTER = re.compile(r"^(.*\.state\[.*\])\['(?:step|mu_product)'\]$")
"""Source of a tensor that optimizers of torch keep on the CPU; the group is that of the state which it is in."""

_ON_DEVICE = ("['eta']", "['mu']")
"""What is in the state of ``torch.optim.ASGD``, which keeps its counters where the parameter is."""


def stay_on_cpu(traced: TracedGraph) -> frozenset[str]:
    """Returns the names of the inputs that an optimizer of torch keeps on the CPU while it trains on a GPU.

    These are counters without dimensions of optimizers that are neither capturable nor fused.
    """
    fused = {n.name for node in traced.module.graph.nodes if is_fused_update(node) for n in node_args(node.args)}
    sources = {given.source for given in traced.inputs}

    def stays(given: GraphInput) -> bool:
        found = _COUNTER.match(given.source)
        if found is None or given.kind == "scalar" or given.example.dim() or given.name in fused:
            return False
        return not all(f"{found[1]}{key}" in sources for key in _ON_DEVICE)

    return frozenset(given.name for given in traced.inputs if stays(given))


def place(traced: TracedGraph, device: torch.device = GPU, on_cpu: Iterable[str] | None = None) -> TracedGraph:
    """Returns the graph with its tensors on another device, as a capture on that device would have recorded it.

    Constants keep their device, and so do tensors of one changing number, as in a program that moves them itself.

    Args:
        traced: a graph captured on CPU tensors; it is not changed.
        device: where its tensors are placed.
        on_cpu: names of inputs that stay on the CPU; by default those of :func:`stay_on_cpu`.

    Raises:
        NotImplementedError: an operator has no implementation for that device.
    """
    stays = stay_on_cpu(traced) if on_cpu is None else frozenset(on_cpu)
    with compat.without_recording(traced.fake_mode), compat.cuda_guard():
        storages: dict[int, torch.Tensor] = {}
        inputs = [
            given
            if is_scalar(given.example) or given.name in stays
            else replace(given, example=compat.fake_elsewhere(given.example, device, storages))
            for given in traced.inputs
        ]
        module = _Placement(traced, device).run([given.example for given in inputs])
    return replace(traced, module=module, inputs=tuple(inputs))


class _Placement:
    """One run of a graph on fake tensors of a device, which writes the graph that is run."""

    def __init__(self, traced: TracedGraph, device: torch.device) -> None:
        self.traced = traced
        self.device = device
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.values: dict[fx.Node, Any] = {}
        """Values of the nodes of the new graph."""

    def run(self, examples: list[Any]) -> fx.GraphModule:
        given = iter(examples)
        for node in self.traced.module.graph.nodes:
            if node.op == "output":
                self._keep_layouts(node)
            made = self.graph.node_copy(node, self.nodes.__getitem__)
            made.meta = dict(node.meta)
            self.nodes[node] = made
            if node.op == "placeholder":
                self._describe(made, _snapshot(next(given)))
            elif node.op == "get_attr":
                self._constant(node, made)
            elif node.op == "call_function":
                self._call(made)
        return compat.late_module(self.traced.module, self.graph)

    def _keep_layouts(self, output: fx.Node) -> None:
        """Copies the results to the strides that the capture recorded: a backward of its own was traced with them."""
        for node in output.all_input_nodes:
            before, now = node.meta.get("val"), self.values[self.nodes[node]]
            if not isinstance(before, torch.Tensor) or not isinstance(now, torch.Tensor):
                continue
            if before.layout != torch.strided or before.stride() == now.stride() or before.shape != now.shape:
                continue
            named = {"dtype": now.dtype, "device": now.device}
            empty = self.graph.call_function(
                torch.ops.aten.empty_strided.default, (before.shape, before.stride()), named
            )
            self._call(empty)
            self.nodes[node] = self.graph.call_function(torch.ops.aten.copy.default, (empty, self.nodes[node]))
            self._call(self.nodes[node])

    def _describe(self, node: fx.Node, value: Any) -> None:
        self.values[node] = value
        node.meta["val"] = fx.node.map_aggregate(value, _snapshot)
        node.meta.pop("tensor_meta", None)

    def _constant(self, node: fx.Node, made: fx.Node) -> None:
        real = getattr(self.traced.module, str(node.target))
        if not isinstance(real, torch.Tensor):
            self.values[made] = real
            return
        self._describe(made, compat.fake_constant(self.traced.fake_mode, real))
        if real.dim():
            copy = self.graph.call_function(torch.ops.aten._to_copy.default, (made,), {"device": self.device})
            self._call(copy)
            self.nodes[node] = copy

    def _call(self, node: fx.Node) -> None:
        before = node.meta.get("val")
        # A number does not move, and that of a tensor's contents keeps its symbol. A fused update returns nothing new,
        # and not each has a kernel for fake tensors.
        if is_scalar(before) or is_fused_update(node):
            self.values[node] = before
            return
        tensors = [tensor for each in node.all_input_nodes for tensor in _tensors(self.values[each])]
        by_program = node.target is torch.ops.aten.scalar_tensor.default and "layout" not in node.kwargs  # not by torch
        moves = node.kwargs.get("device") is not None and not by_program
        if moves and not (tensors and all(each.device == CPU for each in tensors)):
            node.kwargs = {**node.kwargs, "device": self.device}
        rule = DEVICE_OPERATORS.get(node.target)
        if rule is not None and any(each.device == self.device for each in tensors):
            for added in rule(node):
                self._call(added)
        elif str(getattr(node.target, "_schema", "")).startswith(CPU_ONLY):
            raise NotImplementedError(f"{node.target} runs on the CPU only; capture with torch.backends.mkldnn off")
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda each: _concrete(self.values[each]))
        if compat.has_unbacked_sizes(before):
            value = fx.node.map_aggregate(before, lambda each: self._like(each))
        else:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        self._describe(node, value)

    def _like(self, value: Any) -> Any:
        """Returns a fake tensor of the same layout: the sizes are known by symbols that only this node defines."""
        return compat.fake_elsewhere(value, self.device, {}) if isinstance(value, torch.Tensor) else value


def _snapshot(value: Any) -> Any:
    """Returns an alias with the present sizes and strides: later nodes may change them in place."""
    return compat.fake_snapshot(value) if isinstance(value, torch.Tensor) else value


def _concrete(value: Any) -> Any:
    """Returns a number in place of a symbolic float: no layout depends on it, and not every operator takes it."""
    if not isinstance(value, torch.SymFloat):
        return value
    return 1.0 if compat.is_unbacked(value) else float(compat.hint_of(value))


def _tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a node's value."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [each for each in values if isinstance(each, torch.Tensor)]
