"""Values of inputs that a step uses as sizes or decides on: numbers that its prologue computes.

The first capture leaves such values to the graph, whose result serves every value. Where that stops the capture, it is
repeated with ``reads_inputs``: then the prologue computes each value that is read in Python, if it depends on a few
operations on unwritten tensors from outside, in the memory of the host. The number is an input of the graph; a decision
on it is a guard.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.constant_folding import constant_of
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.common.host_programs import HostProgram, Slot, Step
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.guards.source import Source
    from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI

aten = torch.ops.aten

_OF_NUMBER = aten.scalar_tensor

_ON_ANY = frozenset(
    (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.isinf, aten.isfinite, aten.any, aten.all)
    + (aten.logical_and, aten.logical_or, aten.logical_not, aten.logical_xor, aten.count_nonzero, aten.argmax)
    + (aten.argmin, aten.select, aten.slice, aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze)
    + (aten.expand, aten.permute, aten.transpose, aten.t, aten.alias, aten.detach, aten.clone, aten._to_copy)
    + (aten.unbind, aten.arange, aten.lift_fresh_copy, aten.index_select, aten.flip, aten.sort, aten.max, aten.min)
    + (aten.amax, aten.amin, aten.where, aten.masked_fill, aten.neg, aten.abs, aten.sign, aten.sym_size, aten.index)
    + (_OF_NUMBER, aten.zeros_like, aten.ones_like, aten.full_like)
)
"""Operators that compute the same whatever surrounds them, without an effect."""

_ON_INTEGERS = frozenset(
    (aten.add, aten.sub, aten.rsub, aten.mul, aten.floor_divide, aten.div, aten.remainder, aten.sum, aten.cumsum)
    + (aten.clamp, aten.clamp_min, aten.clamp_max, aten.bitwise_and, aten.bitwise_or, aten.bitwise_not, aten.maximum)
    + (aten.minimum, aten.prod, aten.bitwise_xor, aten.stack, aten.cat, aten.gather)
)
"""Operators that do so for integers; of floats, autocast may change what they compute."""

_ON_NUMBERS = frozenset(
    (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, torch.sym_max)
    + (torch.sym_min, operator.getitem)
)
_MOST_OPERATIONS = 24
"""Limit of operations, besides those that put a number into a tensor: there is one for each item of a list."""

_MOST_ELEMENTS = 1 << 16
_MOST_LISTED = 64
"""Limit of elements that are read of one tensor: each is an input of the graph."""

_LITERALS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class HostReads:
    """The values that one capture reads of inputs.

    Attributes:
        wanted: the step needs such a value, and this capture does not read them.
    """

    def __init__(self, world: CaptureWorldAPI) -> None:
        self._world = world
        self._programs: dict[Any, tuple[Source, list[Any]]] = {}
        self._ended = False
        self.wanted = False

    def end(self) -> None:
        """Reads nothing from now on: a backward that is recorded next runs later, when inputs may have changed."""
        self._ended = True

    @property
    def _allowed(self) -> bool:
        return self._world.specialization.host_reads and not (self._world.branching or self._ended)

    def want(self, values: Iterable[Any]) -> None:
        """Notes that the step needs the values of tensors, or of numbers read so far, if the prologue can know one."""
        if self._world.specialization.reads_inputs or not self._allowed or self.wanted:
            return
        tracer = self._world.tracer
        asked = [tracer.node_of(each) for each in values if type(each) is compat.FakeTensor and self._is_small(each)]
        read = [node.args[0] for node in tracer.graph.nodes if node.target is aten._local_scalar_dense.default]
        self.wanted = any(self._of_node(node) is not None for node in (*asked, *read))  # type: ignore[arg-type]

    def number(self, tensor: torch.Tensor) -> Any:
        """Returns the number in a tensor of one element; ``None`` if the prologue cannot know it, or need not."""
        found = self.listed(tensor) if tensor.numel() == 1 else None
        return None if found is None else found[0]

    def size_of(self, tensor: torch.Tensor) -> Any:
        """Returns the integer in a tensor that C++ code uses as a size; ``None`` in the same cases."""
        return self.number(tensor) if tensor.dtype is torch.int64 else None

    def listed(self, tensor: torch.Tensor) -> list[Any] | None:
        """Returns the elements of a small tensor, in order; ``None`` in the same cases."""
        if not self._world.specialization.reads_inputs or not self._allowed or not self._is_small(tensor):
            return None
        if tensor.is_floating_point() and tensor.numel() > 1:  # they rarely are sizes, and no guard should want each
            return None
        found = self._program(tensor)
        if found is None:
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
        return heap.length(value, item)

    def _is_small(self, tensor: torch.Tensor) -> bool:
        if not all(type(size) is int for size in tensor.shape) or not 0 < tensor.numel() <= _MOST_LISTED:
            return False
        return not tensor.dtype.is_complex and self._world.tracer.has_node(tensor)

    def _program(self, tensor: torch.Tensor) -> tuple[Source, list[Any]] | None:
        return self._of_node(self._world.tracer.node_of(tensor))

    def _of_node(self, node: fx.Node) -> tuple[Source, list[Any]] | None:
        """Returns the source of the elements of a node's tensor, and their values; ``None`` if the prologue cannot
        compute them."""
        written = _Writer(self._world).of(node)
        if written is None:  # also after a write to an operand, whatever was read before
            return None
        program, operands, key = written
        if key not in self._programs:
            with compat.real_world():
                values = program(*operands)
            self._programs[key] = self._world.heap.sources.computed(program, f"{node.name} on the host"), values
        return self._programs[key] if self._programs[key][1] else None


class _Writer:
    """Writes a program that computes a node's value, from the nodes that lead to it."""

    def __init__(self, world: CaptureWorldAPI) -> None:
        self._world = world
        tracer = world.tracer
        self._inputs = dict(zip(tracer.placeholders, tracer.real_inputs, strict=True))
        self._numbers = {tracer.node_of(number): source for number, source, _ in world.heap.numbers}

    def of(self, node: fx.Node) -> tuple[HostProgram, list[Any], Any] | None:
        """Returns the program, its operands and a key, which programs that compute the same share; ``None`` if an
        operation on the way is not one that it can repeat."""
        found = self._cone(node)
        if found is None:
            return None
        operands = [each for each in found if each.op == "placeholder"]
        sources = [self._source(each) for each in operands]
        if not sources or any(source is None for source in sources):
            return None
        slots = {each: Slot(position) for position, each in enumerate(operands)}
        steps: list[Step] = []
        key: list[Any] = list(operands)
        for each in found:
            if each.op != "placeholder":
                step = self._step(each, slots)
                key.append(each if self._constant(each) is not None else repr(step))
                slots[each] = Slot(len(operands) + len(steps))
                steps.append(step)
        return HostProgram(tuple(sources), tuple(steps)), [self._inputs[each] for each in operands], tuple(key)

    def _cone(self, node: fx.Node) -> list[fx.Node] | None:
        """Returns the nodes that lead to ``node``, in order; ``None`` if there are others than those allowed."""
        found: set[fx.Node] = set()
        todo, operations = [node], 0
        while todo:
            each = todo.pop()
            if each in found:
                continue
            operations += each.op != "placeholder" and getattr(each.target, "overloadpacket", None) is not _OF_NUMBER
            if operations > _MOST_OPERATIONS or not self._is_allowed(each):
                return None
            found.add(each)
            if self._constant(each) is None:
                todo += each.all_input_nodes
        return sorted(found)

    def _is_allowed(self, node: fx.Node) -> bool:
        held = node.meta.get("val")
        if safe_isinstance(held, torch.Tensor) and not self._is_readable(held):
            return False
        if node.op == "placeholder" or self._constant(node) is not None:
            return True
        if node.op != "call_function" or not self._has_literals(node):
            return False
        if node.target in _ON_NUMBERS:
            return True
        packet = getattr(node.target, "overloadpacket", None)
        inputs = [each.meta.get("val") for each in node.all_input_nodes]
        whole = not any(safe_isinstance(value, torch.Tensor) and value.dtype.is_floating_point for value in inputs)
        schema = getattr(node.target, "_schema", None)
        known = packet in _ON_ANY or (packet in _ON_INTEGERS and whole)
        return known and schema is not None and not schema.is_mutable

    def _is_readable(self, held: torch.Tensor) -> bool:
        """Returns True for a tensor on the host of known extent that nothing has written to."""
        if held.device.type != "cpu" or held.layout is not torch.strided or self._world.writes.to(held):
            return False
        sizes = [compat.hint_of(size) if safe_isinstance(size, torch.SymInt) else size for size in held.shape]
        return None not in sizes and math.prod(sizes) <= _MOST_ELEMENTS

    def _has_literals(self, node: fx.Node) -> bool:
        found: list[bool] = []

        def look(value: Any) -> None:
            if safe_isinstance(value, (tuple, list)):
                for item in value:
                    look(item)
            else:
                found.append(safe_isinstance(value, fx.Node) or safe_isinstance(value, _LITERALS))

        look((node.args, tuple(node.kwargs.values())))
        return all(found)

    def _constant(self, node: fx.Node) -> torch.Tensor | None:
        """Returns the contents of a small tensor that no input changes."""
        if node.op == "placeholder" or not safe_isinstance(node.meta.get("val"), torch.Tensor):
            return None
        return constant_of(self._world.tracer, node)

    def _source(self, node: fx.Node) -> Source | None:
        if node in self._numbers:
            return self._numbers[node]
        record = self._world.heap.by_real.get(id(self._inputs.get(node)))
        if not safe_isinstance(record, TensorRecord) or record.entry_storage is not None:
            return None
        return record.source if compat.is_plain_strided(record.real) else None

    def _step(self, node: fx.Node, slots: dict[fx.Node, Slot]) -> Step:
        constant = self._constant(node)
        if constant is not None:
            with compat.real_world():
                return Step(torch.clone, (constant.clone(),), {})
        args: Any = fx.map_arg(node.args, slots.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, slots.__getitem__)
        return Step(node.target, tuple(args), dict(kwargs))  # type: ignore[arg-type]
