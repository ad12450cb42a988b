"""Predicated writes: what a region of the trace writes is kept only where a flag of the graph is true.

The region is recorded as if the flag were true. Then, for every tensor from before the region that it has written, the
graph gets a copy of the old value in front of the region, and ``where(flag, new, old)`` behind it. So the graph itself
decides, on the device, and the host need not know.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.dispatch_mode import is_draw
from sidefx_train.compile.capture.recording.runtime_asserts import append
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.artifacts import HIDDEN_FROM_AUTOGRAD, PREDICATED
from sidefx_train.compile.graph.fx_utils import emit, written_args
from sidefx_train.compile.ops.runtime_assert import RUNTIME_ASSERT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.tracer import GraphTracer

aten = torch.ops.aten


class PredicatedRegion:
    """Everything that is recorded from now on.

    Args:
        tracer: tracer of the capture.
        flag: one-element tensor of the trace: True where the writes are kept.
    """

    def __init__(self, tracer: GraphTracer, flag: torch.Tensor) -> None:
        self._tracer = tracer
        self._flag = tracer.node_of(flag)
        self._start = tracer.last_node()
        self._before = set(tracer.graph.nodes)
        self._copies: dict[torch.device, fx.Node] = {}

    def assume(self) -> None:
        """Asserts in front of the region that the flag is true."""
        with compat.no_recording(), self._tracer.graph.inserting_after(self._start):
            emit(self._tracer.graph, self._tracer.fake_mode, RUNTIME_ASSERT, self._flag, True)

    def why_not(self) -> str:
        """Returns why the region's writes cannot be predicated; empty if they can."""
        for node in self._nodes():
            if is_draw(node.target, node.args, node.kwargs):
                return "draws random numbers"
            written = written_args(node)
            if written and HIDDEN_FROM_AUTOGRAD not in node.meta:
                return "writes with autograd on"
            for tensor in written:
                held = tensor.meta["val"]
                if held.layout is not torch.strided or self._outside(tensor) is None:
                    return "writes to a tensor in a way that cannot be taken back"
        return ""

    def close(self) -> list[fx.Node]:
        """Predicates the writes; returns the tensors that they are to."""
        written = dict.fromkeys(each for node in self._nodes() for each in written_args(node))
        tensors = dict.fromkeys(self._outside(each) for each in written)
        fakes = compat.tracked_tensors(self._tracer.tracer)
        found = [each for each in tensors if each is not None and each is not _INSIDE]
        with compat.no_recording():
            for tensor in found:
                self._predicate(tensor)
                if tensor in fakes:
                    compat.forget_constant(fakes[tensor], self._tracer.tracer)
        return found

    def _nodes(self) -> list[fx.Node]:
        return [node for node in self._tracer.graph.nodes if node not in self._before and node.op == "call_function"]

    def _outside(self, tensor: fx.Node) -> Any:
        """Returns the tensor from before the region whose memory a written one is in: itself, or what it is a view of.

        :data:`_INSIDE` if the region has made that memory; ``None`` if it is unknown.
        """
        storage = compat.storage_id(tensor.meta["val"])
        while tensor not in self._before and tensor.op == "call_function":
            source = tensor.args[0] if tensor.args else None
            if not safe_isinstance(source, fx.Node) or not safe_isinstance(source.meta.get("val"), torch.Tensor):
                break
            if compat.storage_id(source.meta["val"]) != storage:
                break
            tensor = source
        if tensor in self._before or tensor.op == "placeholder":
            return tensor
        return None if storage in self._storages_before else _INSIDE

    @functools.cached_property
    def _storages_before(self) -> set[int]:
        values = [node.meta.get("val") for node in self._before]
        return {compat.storage_id(value) for value in values if safe_isinstance(value, torch.Tensor)}

    def _predicate(self, tensor: fx.Node) -> None:
        graph, fake_mode = self._tracer.graph, self._tracer.fake_mode
        with graph.inserting_after(self._start):
            old = emit(graph, fake_mode, aten.clone.default, tensor)
        flag = self._flag_on(tensor.meta["val"].device)
        kept = append(self._tracer, aten.where.self, flag, tensor, old)
        written = append(self._tracer, aten.copy_.default, tensor, kept)
        written.meta |= {HIDDEN_FROM_AUTOGRAD: "no_grad", PREDICATED: True}

    def _flag_on(self, device: torch.device) -> fx.Node:
        """Returns the flag on the device of a tensor."""
        if self._flag.meta["val"].device == device:
            return self._flag
        if device not in self._copies:
            self._copies[device] = append(self._tracer, aten._to_copy.default, self._flag, device=device)
        return self._copies[device]


_INSIDE = object()
