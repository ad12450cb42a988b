"""Values of inputs that a step uses as sizes or decides on: numbers that its prologue computes.

The first capture leaves such values to the graph, whose result serves every value. Where that stops the capture, it is
repeated with ``reads_inputs``: then the prologue computes each value that is read in Python, if it depends on a few
operations on unwritten tensors from outside, in the memory of the host. The number is an input of the graph; a decision
on it is a guard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.counted_results import Count, count_of
from sidefx_train.compile.capture.world.symbolic_numbers.program_writer import ProgramWriter, Written
from sidefx_train.compile.common.host_programs import HostProgram, Step

if TYPE_CHECKING:
    from sidefx_train.compile.capture.guards.source import Source
    from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI

aten = torch.ops.aten

_MOST_LISTED = 64
"""Limit of elements that are read of one tensor: each is an input of the graph."""
_READ_BY_CODE = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


class HostReads:
    """The values that one capture reads of inputs.

    Attributes:
        wanted: the step needs such a value, and this capture does not read them.
    """

    def __init__(self, world: CaptureWorldAPI) -> None:
        self._world = world
        self._programs: dict[Any, tuple[Source, list[Any]]] = {}
        self._not_known: set[fx.Node] = set()
        self._last_counted: fx.Node | None = None
        """The last node of the graph when no result's size could be known."""
        self._ended = False
        self.wanted = False

    def end(self) -> None:
        """Reads nothing from now on: a backward that is recorded next runs later, when inputs may have changed."""
        self._ended = True

    @property
    def allowed(self) -> bool:
        """True if the prologue may compute numbers that the step needs here."""
        return self._world.specialization.host_reads and not (self._world.branching or self._ended)

    def want(self, values: Iterable[Any]) -> None:
        """Notes that the step needs the values of tensors, or of numbers read so far, if the prologue can know one."""
        if self._world.specialization.reads_inputs or not self.allowed or self.wanted:
            return
        tracer = self._world.tracer
        asked = [tracer.node_of(each) for each in values if type(each) is compat.FakeTensor and self._is_small(each)]
        read = [node.args[0] for node in tracer.graph.nodes if node.target is aten._local_scalar_dense.default]
        self.wanted = any(self._may_know(node) for node in (*asked, *read)) or self._can_count()  # type: ignore[arg-type]

    def _may_know(self, node: fx.Node) -> bool:
        """Returns True if the prologue can know what a node computes; asks once for one of which it cannot."""
        if node in self._not_known:
            return False
        if self._of_node(node) is not None:
            return True
        self._not_known.add(node)
        return False

    def _can_count(self) -> bool:
        """Returns True if the step has a result whose size depends on contents, and the prologue can know its size."""
        nodes = self._world.tracer.graph.nodes
        new = list(takewhile(lambda node: node is not self._last_counted, reversed(nodes)))
        for node in reversed(new):
            if type(node.target) in compat.OPERATORS and self._count_of_node(node) is not None:
                return True
        self._last_counted = new[0] if new else self._last_counted
        return False

    def _count_of_node(self, node: fx.Node) -> tuple[Source, list[Any]] | None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
        counted = count_of(node.target, args, kwargs)
        if counted is None:
            return None
        return self._counted(counted, next(n for n in node.all_input_nodes if n.meta.get("val") is counted.tensor))

    def number(self, tensor: torch.Tensor) -> Any:
        """Returns the number in a tensor of one element; ``None`` if the prologue cannot know it, or need not."""
        found = self.listed(tensor) if tensor.numel() == 1 else None
        return None if found is None else found[0]

    def read_by_code(self, tensor: torch.Tensor) -> Any:
        """Returns the integer or truth value in a tensor that C++ code reads; ``None`` in the same cases."""
        return self.number(tensor) if tensor.dtype in _READ_BY_CODE else None

    def count(self, counted: Count) -> Any:
        """Returns the number of elements of a result whose size depends on contents; ``None`` in the same cases."""
        if not self._world.specialization.reads_inputs or not self.allowed:
            return None
        tracer = self._world.tracer
        found = self._counted(counted, tracer.node_of(counted.tensor)) if tracer.has_node(counted.tensor) else None
        return None if found is None else self._element(found[0], 0, found[1][0])

    def listed(self, tensor: torch.Tensor) -> list[Any] | None:
        """Returns the elements of a small tensor, in order; ``None`` in the same cases."""
        if not self._world.specialization.reads_inputs or not self.allowed or not self._is_small(tensor):
            return None
        if tensor.is_floating_point() and tensor.numel() > 1:  # they rarely are sizes, and no guard should want each
            return None
        found = self._program(tensor)
        if found is None or math.prod(map(int, tensor.shape)) != len(found[1]):  # guards the sizes
            return None
        source, values = found
        return [self._element(source, position, value) for position, value in enumerate(values)]

    def _element(self, source: Source, position: int, value: Any) -> Any:
        heap = self._world.heap
        item = heap.sources.item(source, position, source.label if position == 0 else f"{source.label}[{position}]")
        if type(value) is bool:
            heap.guard("is", item, value)
            return value
        if not math.isfinite(value):
            heap.guard("equal", item, value)
            return value
        return heap.numbers.length(value, item)

    def _is_small(self, tensor: torch.Tensor) -> bool:
        sizes = [compat.hint_of(size) if type(size) is torch.SymInt else size for size in tensor.shape]
        if None in sizes or not 0 < math.prod(sizes) <= _MOST_LISTED:
            return False
        return not tensor.dtype.is_complex and self._world.tracer.has_node(tensor)

    def _program(self, tensor: torch.Tensor) -> tuple[Source, list[Any]] | None:
        return self._of_node(self._world.tracer.node_of(tensor))

    def _counted(self, counted: Count, node: fx.Node) -> tuple[Source, list[Any]] | None:
        """Returns the source of the number of elements of a result, which depends on a node's tensor, and its value."""
        written = ProgramWriter(self._world).of([node])
        if written is None:
            return None
        step = Step(counted.function, (written.slots[node], *counted.args), {})
        written = written._replace(steps=[*written.steps, step], key=(*written.key, repr(step)))
        return self._computed(written, f"elements of {node.name} on the host")

    def _of_node(self, node: fx.Node) -> tuple[Source, list[Any]] | None:
        """Returns the source of the elements of a node's tensor, and their values; ``None`` if the prologue cannot
        compute them."""
        written = ProgramWriter(self._world).of([node])
        if written is None:  # also after a write to an operand, whatever was read before
            return None
        return self._computed(written, f"{node.name} on the host")

    def _computed(self, written: Written, label: str) -> tuple[Source, list[Any]] | None:
        key = written.key
        if key not in self._programs:
            program = HostProgram(written.sources, tuple(written.steps))
            with compat.real_world():
                values = program(*written.operands)
            self._programs[key] = self._world.heap.sources.computed(program, label), values
        return self._programs[key] if self._programs[key][1] else None
