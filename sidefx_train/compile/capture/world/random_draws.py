"""Random numbers of the step that its prologue reads: symbolic numbers, on which the step may decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.dispatch_mode import is_draw
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.host_draws import (
    Draw,
    EmptyTensor,
    HostDraws,
    TorchDraw,
    copy_of,
    is_generator,
    is_global,
)
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.fx_utils import one_generator

if TYPE_CHECKING:
    from sidefx_train.compile.capture.guards.source import Source
    from sidefx_train.compile.capture.shadows.shadow_table import ShadowTable

aten = torch.ops.aten
_PLAIN = frozenset({int, float})
_MOST_BYTES = 1 << 24
"""Size limit of a drawn array; larger ones are drawn where the program does."""

_MOST_LISTED = 64
"""Limit of numbers that one call draws; each is an input of the graph."""

_LARGEST = 2**62
"""Bound of integers that symbolic numbers represent."""

_NUMBERS = frozenset({aten.rand, aten.randn, aten.randint})
_BY_LAYOUT = frozenset(
    (*_NUMBERS, aten.rand_like, aten.randn_like, aten.randint_like, aten.randperm, aten.native_dropout)
    + (aten.uniform_, aten.normal_, aten.random_, aten.exponential_, aten.geometric_, aten.log_normal_, aten.cauchy_)
)
"""Operators that draw as many numbers as the layout of their tensors says; so does ``bernoulli_`` of one number."""


class RandomDraws:
    """The draws of one capture. It draws from copies: the program's generators do not advance.

    Attributes:
        values: the drawn numbers, in order; the entry draws its own into this list.
        wanted: the step decides on a number that torch draws on the CPU.
    """

    def __init__(self, heap: ShadowTable) -> None:
        self._heap = heap
        self._draws: list[Draw] = []
        self._of_torch: list[TorchDraw] = []
        self._numbers: dict[fx.Node, Any] = {}
        self._copies: dict[int, Any] = {}
        self._state: torch.Tensor | None = None
        self._ended = False
        self.values: list[Any] = []
        self.wanted = False

    def end(self) -> None:
        """Draws nothing early from now on: a backward that is recorded next runs later, outside the step."""
        self._ended = True

    def finish(self) -> HostDraws:
        """Returns the draws for the entry."""
        foretells = self._heap.specialization.foretells_draws
        return HostDraws(tuple(self._draws), self.values, tuple(self._of_torch), foretells)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draws a number by ``function(*args, **kwargs)``, a method of a generator.

        Returns:
            The number, or ``ABSENT`` if it is not drawn early: the generator is not an outside object that the entry
            holds, or an argument is not a plain number.

        Raises:
            Unsupported: the result is not a number that the graph could get.
        """
        heap, generator = self._heap, args[0]
        if self._ended or not heap.specialization.host_draws or not is_generator(generator):
            return ABSENT
        record = heap.record_of(generator)
        held = record is not None and record.real is generator and record.base.kind == "const"
        if not held and not is_global(generator):
            return ABSENT
        if not all(map(_is_argument, (*args[1:], *kwargs.values()))):
            return ABSENT
        copy = self._copies.get(id(generator))
        if copy is None:
            copy = self._copies[id(generator)] = copy_of(generator)
        label = trace_rules.describe(function)
        try:
            value = function(copy, *args[1:], **kwargs)
        except (TypeError, ValueError):
            heap.refuse("SFX103", f"calls {label} with arguments that it rejects")
        if _is_array(value):
            self._draws.append(Draw(len(self.values), function, generator, args[1:], kwargs))
            return self._array(value, label)
        if type(value) is list and len(value) <= _MOST_LISTED and all(type(item) is int for item in value):
            self._draws.append(Draw(len(self.values), function, generator, args[1:], kwargs))
            return self._list(value, label)
        known = type(value) in _PLAIN and math.isfinite(value) and abs(value) < _LARGEST
        if not known:
            heap.refuse("SFX103", f"calls {label}, whose result is not a number that the graph can get")
        self._draws.append(Draw(len(self.values), function, generator, args[1:], kwargs))
        return self._number(value, label)

    def derive(self, array: ArrayRecord, function: Callable[..., Any], args: tuple[Any, ...], label: str) -> Any:
        """Computes ``function(array, *args)`` of a drawn array early, too; :data:`ABSENT` if the result is no array."""
        if self._ended:
            return ABSENT
        try:
            made = function(array.real, *args)
        except (TypeError, ValueError, ArithmeticError):
            return ABSENT  # run natively, it raises the program's error
        if not _is_array(made):
            return ABSENT
        values, position = self.values, array.source.key

        def again(_: Any) -> Any:
            return function(values[position], *args)

        self._draws.append(Draw(len(values), again, None, (), {}))
        return self._array(made, label)

    def _array(self, value: Any, label: str) -> Any:
        source = self._append(value, label)
        shadow = self._heap.shadow(value, source)
        record = self._heap.record_of(shadow)
        assert safe_isinstance(record, ArrayRecord), "an array has a record of arrays"
        record.drawn = True
        return shadow

    def _list(self, value: list[int], label: str) -> list[Any]:
        source, sources = self._append(value, label), self._heap.sources
        return [self._heap.length(item, sources.item(source, index)) for index, item in enumerate(value)]

    def _number(self, value: int | float, label: str) -> Any:
        return self._heap.length(value, self._append(value, label))

    def _append(self, value: Any, label: str) -> Source:
        """Adds a value, and returns where the entry will find its own."""
        self.values.append(value)
        number, sources = len(self.values), self._heap.sources
        name = f"{label}()" if number == 1 else f"{label}() (draw {number})"
        return sources.item(sources.const(self.values, "draws"), number - 1, name)

    def want(self, values: Iterable[Any]) -> None:
        """Notes that the step decides on values of the graph, if they depend on numbers that torch draws alone."""
        if self._heap.specialization.reads_draws or not self._heap.specialization.host_draws or self._ended:
            return
        tracer = self._heap.tracer
        kinds = (torch.Tensor, *compat.SYMBOLS)
        todo = [tracer.node_of(each) for each in values if safe_isinstance(each, kinds) and tracer.has_node(each)]
        drawn = False
        for node in todo:  # grows
            if _is_number_draw(node):
                drawn = True
            elif node.op == "placeholder" or not _is_small(node.meta.get("val")):
                return
            else:
                todo += node.all_input_nodes
        self.wanted = drawn

    def of_node(self, node: fx.Node) -> Any:
        """Returns the number that a node draws; ``None`` if the node draws none, or its place in torch's sequence of
        numbers depends on more than the layout of tensors."""
        if node in self._numbers:
            return self._numbers[node]
        spec, mode = self._heap.specialization, self._heap.tracer.proxy_mode
        if self._ended or not (spec.reads_draws and spec.host_draws) or not _is_number_draw(node) or mode.cursors:
            return None
        before: list[fx.Node] = []
        if spec.foretells_draws:
            before = [each for each in mode.draws("cpu") if each < node and self._is_of_default(each)]
            if len(before) < len(self._of_torch):  # it is read after a later one
                return None
        calls = [_call_of(each) for each in (*before[len(self._of_torch) :], node)]
        if any(call is None for call in calls):
            return None
        known = [call for call in calls if call is not None]
        value = self._foretold(known)
        self._of_torch += [*known[:-1], known[-1]._replace(position=len(self.values))]
        number = self._numbers[node] = self._number(value, f"torch.{node.target._schema.name.partition('::')[2]}")
        self._replace(node, number)
        return number

    def _is_of_default(self, draw: fx.Node) -> bool:
        """Returns True for a draw from torch's default generator, named or not."""
        generator = draw.kwargs.get("generator")
        if generator is None:
            return True
        held = getattr(self._heap.tracer.tracer.root, str(getattr(generator, "target", "")), None)
        return held is None or one_generator(held, torch.default_generator)

    def _foretold(self, calls: list[TorchDraw]) -> Any:
        """Returns the result of the last of the draws that follow those made so far; torch's generator is left."""
        generator = torch.default_generator
        with compat.real_world(), torch.no_grad():
            before = generator.get_state()
            try:
                if self._state is not None:
                    generator.set_state(self._state)
                for call in calls:
                    drawn = call()
                self._state = generator.get_state()
                return drawn.item()
            finally:
                generator.set_state(before)

    def _replace(self, node: fx.Node, number: Any) -> None:
        """Makes the node a tensor of the number; the draw itself stays in the graph."""
        graph, value = self._heap.tracer.graph, node.meta["val"]
        with graph.inserting_before(node):
            draw = graph.call_function(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
        draw.meta = dict(node.meta)
        node.target = aten.full.default
        node.args = (list(value.shape), self._heap.tracer.node_of(number))
        node.kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}


def _is_argument(value: Any) -> bool:
    """Returns True for an argument of a draw that is the same at every call."""
    if type(value) is tuple:
        return all(type(item) is int for item in value)
    return type(value) in _PLAIN or type(value) in (bool, range) or value is None


def _is_array(value: Any) -> bool:
    """Returns True for an array that can become a tensor over its memory."""
    if type(value) is not np.ndarray or value.nbytes > _MOST_BYTES or value.dtype.byteorder not in "=|":
        return False
    return value.dtype.kind in "bif" and value.dtype.itemsize <= 8 and bool(value.flags.c_contiguous)


def _is_small(value: Any) -> bool:
    """Returns True for a number, or a tensor of one element."""
    if not safe_isinstance(value, torch.Tensor):
        return safe_isinstance(value, (int, float, *compat.SYMBOLS))
    return all(type(size) is int and size == 1 for size in value.shape)


def _is_number_draw(node: fx.Node) -> bool:
    """Returns True for a draw of one number on the CPU from torch's default generator."""
    packet = getattr(node.target, "overloadpacket", None)
    value = node.meta.get("val")
    if packet not in _NUMBERS or node.kwargs.get("generator") is not None or not _is_small(value):
        return False
    return value.device.type == "cpu" and value.dtype in (torch.float32, torch.float64, torch.int64)


def _call_of(node: fx.Node) -> TorchDraw | None:
    """Returns a draw of the graph as a call of its own; ``None`` if it depends on values."""
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    by_number = packet is aten.bernoulli_ and not any(safe_isinstance(arg, fx.Node) for arg in node.args[1:])
    if not (packet in _BY_LAYOUT or by_number) or not is_draw(node.target, node.args, node.kwargs):
        return None
    args = [_layout_of(arg) for arg in node.args]
    plain = not any(map(_has_nodes, (args, node.kwargs)))
    return TorchDraw(None, node.target, tuple(args), dict(node.kwargs)) if plain else None  # type: ignore[arg-type]


def _has_nodes(value: Any) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return bool(found)


def _layout_of(arg: Any) -> Any:
    """Returns what stands for a tensor in a call; the argument itself for anything else."""
    value = arg.meta.get("val") if safe_isinstance(arg, fx.Node) else None
    if not safe_isinstance(value, torch.Tensor):
        return arg
    layout = EmptyTensor(tuple(value.shape), tuple(value.stride()), value.dtype)
    fixed = all(type(number) is int for number in (*layout.size, *layout.stride))
    return layout if fixed and value.device.type == "cpu" else arg
