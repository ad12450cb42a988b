"""Writes the programs that the prologue runs to know numbers, from the part of the graph that computes them.

An operation is repeated there if it computes the same whatever surrounds it, has no effect, and reads only small,
unwritten tensors from outside in the memory of the host, or numbers. Writes to results of such operations are repeated
on the program's own results, in the order of the graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.constant_folding import constant_of
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.common.host_programs import Slot, Step
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
    + (_OF_NUMBER, aten.zeros_like, aten.ones_like, aten.full_like, aten.nonzero_static, aten.new_ones)
    + (aten.new_zeros, aten.new_full, aten.new_empty, aten.zeros, aten.ones, aten.full, aten.bucketize)
    + (aten.searchsorted, aten.isin, aten.linspace, aten.tril, aten.triu, aten.roll, aten.gather)
    + (aten.repeat_interleave,)
)
"""Operators that compute the same whatever surrounds them, without an effect."""

_ON_INTEGERS = frozenset(
    (aten.add, aten.sub, aten.rsub, aten.mul, aten.floor_divide, aten.div, aten.remainder, aten.sum, aten.cumsum)
    + (aten.clamp, aten.clamp_min, aten.clamp_max, aten.bitwise_and, aten.bitwise_or, aten.bitwise_not, aten.maximum)
    + (aten.minimum, aten.prod, aten.bitwise_xor, aten.stack, aten.cat, aten.scatter, aten.index_add)
)
"""Operators that do so for integers; of floats, autocast may change what they compute."""

_WRITES = frozenset(
    (aten.copy_, aten.fill_, aten.zero_, aten.masked_fill_, aten.index_put_, aten.logical_not_, aten.logical_and_)
    + (aten.logical_or_, aten.bitwise_and_, aten.bitwise_or_)
)
"""Operators that write the same whatever surrounds them."""

_ON_FLOATS = frozenset(
    (aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.floor, aten.ceil, aten.trunc, aten.round, aten.maximum)
    + (aten.minimum, aten.clamp, aten.clamp_min, aten.clamp_max, aten.relu, aten.square, aten.reciprocal, aten.sqrt)
    + (aten.exp, aten.expm1, aten.log, aten.log1p, aten.log2, aten.log10, aten.pow, aten.rsqrt, aten.tanh, aten.sin)
    + (
        aten.sigmoid,
        aten.softplus,
        aten.cos,
        aten.tan,
        aten.atan,
        aten.sum,
        aten.mean,
        aten.prod,
        aten.linalg_vector_norm,
    )
)
"""Operators that do so for floats in single and double precision; only a few numbers: the graph computes them again."""

_FEW = 64

_ON_NUMBERS = frozenset(
    (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow)
    + (operator.neg, operator.pos, operator.lshift, operator.rshift, operator.and_, operator.or_, operator.xor)
    + (operator.getitem, *compat.host_functions())
)
_MOST_OPERATIONS = 24
"""Limit of operations, besides those that put a number into a tensor: there is one for each item of a list."""

_MOST_ELEMENTS = 1 << 16
_LITERALS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_small(value: Any) -> bool:
    """Returns True for a number, and for a tensor of a few that autocast leaves as they are."""
    if not safe_isinstance(value, torch.Tensor):
        return True
    known = value.dtype in (torch.float32, torch.float64, torch.int64, torch.bool)
    return known and all(type(size) is int for size in value.shape) and 0 < math.prod(value.shape) <= _FEW


class Written(NamedTuple):
    """The operations that compute the values of some nodes from values from outside.

    Attributes:
        sources: paths of the operands.
        operands: their values now.
        steps: the operations.
        slots: where each node's value is, among the operands and the results of the steps.
        key: programs that compute the same share it.
    """

    sources: tuple[Source, ...]
    operands: list[Any]
    steps: list[Step]
    slots: dict[fx.Node, Slot]
    key: tuple[Any, ...]


class ProgramWriter:
    """Writes a program that computes the values of nodes, from the nodes that lead to them."""

    def __init__(self, world: CaptureWorldAPI) -> None:
        self._world = world
        tracer = world.tracer
        self._inputs = dict(zip(tracer.placeholders, tracer.real_inputs, strict=True))
        self._numbers = {}
        for number, source, real in world.heap.numbers.inputs:
            node = tracer.node_of(number)
            self._numbers[node], self._inputs[node] = world.heap.numbers.of_numpy.get(id(number), (source, real))

    def of(self, nodes: Iterable[fx.Node]) -> Written | None:
        """Returns the program; ``None`` if an operation on the way is not one that it can repeat."""
        nodes = list(nodes)
        found = self._cone(nodes)
        if found is None:
            return None
        operands = [each for each in found if each.op == "placeholder"]
        sources = [source for source in map(self._source, operands) if source is not None]
        if not sources or len(sources) < len(operands):
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
        if steps and len(nodes) == 1 and slots[nodes[0]].position != len(operands) + len(steps) - 1:
            steps.append(Step(aten.alias.default, (slots[nodes[0]],), {}))  # a write to its memory came later
        return Written(tuple(sources), [self._inputs[each] for each in operands], steps, slots, tuple(key))

    def _cone(self, nodes: Iterable[fx.Node]) -> list[fx.Node] | None:
        """Returns the nodes that lead to ``nodes``, in order; ``None`` if there are others than those allowed."""
        found: set[fx.Node] = set()
        todo, operations = list(nodes), 0
        while todo:
            each = todo.pop()
            if each in found:
                continue
            operations += each.op != "placeholder" and getattr(each.target, "overloadpacket", None) is not _OF_NUMBER
            if operations > _MOST_OPERATIONS or not self._is_allowed(each):
                return None
            found.add(each)
            if self._constant(each) is None:
                todo += [*each.all_input_nodes, *self._writes(each)]
        return sorted(found)

    def _writes(self, node: fx.Node) -> list[fx.Node]:
        """Returns the operations that have written to a node's memory so far."""
        held = node.meta.get("val")
        if not safe_isinstance(held, torch.Tensor):
            return []
        overwritten = self._world.random_draws.of_torch.overwritten
        return [each for each in self._world.writes.to(held) if each not in overwritten]

    def _is_allowed(self, node: fx.Node) -> bool:
        held = node.meta.get("val")
        if safe_isinstance(held, torch.Tensor) and not self._is_readable(held):
            return False
        if node.op == "placeholder":
            return not self._writes(node)
        if self._constant(node) is not None:
            return True
        if node.op != "call_function" or not self._has_literals(node):
            return False
        if node.target in _ON_NUMBERS:
            return True
        packet = getattr(node.target, "overloadpacket", None)
        inputs = [each.meta.get("val") for each in node.all_input_nodes]
        whole = not any(safe_isinstance(value, torch.Tensor) and value.dtype.is_floating_point for value in inputs)
        schema = getattr(node.target, "_schema", None)
        few = all(map(_is_small, (*inputs, held)))
        if schema is None or schema.is_mutable:
            return packet in _WRITES
        if packet is aten.empty:  # to be filled; eager reads what is left of its memory, too
            return bool(self._writes(node))
        if packet is aten.stack:  # which autocast leaves as it is if all are alike
            return len({value.dtype for value in inputs if safe_isinstance(value, torch.Tensor)}) == 1
        return packet in _ON_ANY or (packet in _ON_INTEGERS and whole) or (packet in _ON_FLOATS and few)

    def _is_readable(self, held: torch.Tensor) -> bool:
        """Returns True for a tensor on the host of known extent."""
        if held.device.type != "cpu" or held.layout is not torch.strided:
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
