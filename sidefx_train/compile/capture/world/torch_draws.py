"""Numbers that the step draws from generators of torch's, foretold in the prologue: the step may decide on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.constant_folding import constant_of, may_be_constant
from sidefx_train.compile.capture.recording.dispatch_mode import is_draw
from sidefx_train.compile.common.draws.draw import Draw, EmptyTensor, OwnGenerator, Reseeding, TorchDraw
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.fx_utils import one_generator

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI
    from sidefx_train.compile.capture.world.draw_arguments import Arguments

aten = torch.ops.aten

_OF_SIZES = (aten.rand, aten.randn, aten.randint)
_BY_CONSTANTS = frozenset((aten.multinomial, aten.bernoulli))
"""Operators that draw with probabilities in a tensor."""
_NUMBERS = frozenset((*_OF_SIZES, *_BY_CONSTANTS, aten.uniform_, aten.normal_, aten.bernoulli_))
_BY_LAYOUT = frozenset(
    (*_OF_SIZES, aten.rand_like, aten.randn_like, aten.randint_like, aten.randperm, aten.native_dropout)
    + (aten.uniform_, aten.normal_, aten.random_, aten.exponential_, aten.geometric_, aten.log_normal_, aten.cauchy_)
)
"""Operators that draw as many numbers as the layout of their tensors says; so does ``bernoulli_`` of one number."""


_MOST_DRAWN = 16
"""Limit of elements of a draw that the prologue reads: each is an input of the graph."""


class TorchDraws:
    """The few numbers that a draw of torch on the CPU makes, in one capture; the draws themselves stay in the graph.

    Args:
        heap: the shadows of the capture.
        values: what the prologue draws, in order.
        draws: all draws of the prologue, in order.
        append: adds a number with its name to the values, and returns the symbolic number.
        new_arguments: returns what finds the numbers among the arguments of a draw at each call.
        seed_of: returns the seed of a generator that the step creates, if that changes.

    Attributes:
        calls: the draws up to the last one that the prologue reads.
        wanted: the step decides on such a number.
        ended: nothing is read early any more.
        overwritten: draws in place, whose results the numbers of the prologue replace.
    """

    def __init__(
        self,
        heap: ShadowTableAPI,
        values: list[Any],
        draws: list[Draw | TorchDraw],
        append: Callable[[Any, str], Any],
        new_arguments: Callable[[], Arguments],
        seed_of: Callable[[torch.Generator], Reseeding | None],
    ) -> None:
        self._heap, self._values, self._draws, self._append = heap, values, draws, append
        self._new_arguments, self._seed_of = new_arguments, seed_of
        self._own: dict[int, _OwnDraws] = {}
        self._numbers: dict[fx.Node, Any] = {}
        self._state: torch.Tensor | None = None
        self.calls: list[TorchDraw] = []
        self.overwritten: set[fx.Node] = set()
        self.wanted = self.ended = False

    @property
    def are_used(self) -> bool:
        """Whether the step has drawn from the generator, or used its state."""
        mode = self._heap.tracer.proxy_mode
        return bool(self._state is not None or self.calls or mode.cursors or mode.saved or mode.has_drawn())

    def seed(self, seed: int) -> None:
        """Continues as after ``torch.manual_seed``."""
        self._state = torch.Generator().manual_seed(seed).get_state()

    def want(self, values: Iterable[Any]) -> None:
        """Notes that the step decides on values of the graph, if they depend on numbers alone, some of which torch
        draws."""
        spec = self._heap.specialization
        if spec.reads_dependent_draws or not spec.host_draws or self.ended:
            return
        tracer = self._heap.tracer
        kinds = (torch.Tensor, *compat.SYMBOLS)
        todo = [tracer.node_of(each) for each in values if safe_isinstance(each, kinds) and tracer.has_node(each)]
        drawn, seen = False, set(todo)
        for node in todo:  # grows
            used: Iterable[fx.Node] = ()
            if is_small_draw(node):
                used = _inputs_of(node)
                drawn |= not spec.reads_draws or bool(used)
            elif not _is_small(node.meta.get("val")) or (node.op == "placeholder" and _is_tensor(node)):
                return
            elif node.op != "placeholder":
                used = node.all_input_nodes
            todo += (new := set(used) - seen)
            seen |= new
        self.wanted = drawn

    def want_read(self) -> None:
        """Does the same for the numbers that the step has read so far: it needs the value of one."""
        for node in self._heap.tracer.graph.nodes:
            if node.target is aten._local_scalar_dense.default and not self.wanted:
                self.want((node.meta["val"],))

    def of_node(self, node: fx.Node) -> Any:
        """Returns the number that a node draws, or a list of its numbers; ``None`` if the node draws none, or its place
        in torch's sequence of numbers depends on more than the layout of tensors."""
        if node in self._numbers:
            return self._numbers[node]
        spec, mode = self._heap.specialization, self._heap.tracer.proxy_mode
        if self.ended or not (spec.reads_draws and spec.host_draws) or not is_small_draw(node) or mode.cursors:
            return None
        if _inputs_of(node) and not spec.reads_dependent_draws:  # its place would be guarded where the graph takes any
            return None
        own = None if self._is_of_default(node) else self._own_draws(node)
        made = self.calls if own is None else own.calls
        before: list[fx.Node] = []
        if spec.foretells_draws or own is not None:
            before = [each for each in mode.draws("cpu") if each < node and self._is_of(each, own)]
            if len(before) < len(made):  # it is read after a later one
                return None
        arguments = self._new_arguments()
        calls = [self._call_of(each, arguments) for each in (*before[len(made) :], node)]
        if arguments.unknown or any(call is None for call in calls):
            return None
        known = [call for call in calls if call is not None]
        if own is not None:
            known = [call._replace(generator=own.generator) for call in known]
        values = self._foretold(known, arguments.now) if own is None else own.draw(known, arguments.now)
        known[-1] = known[-1]._replace(position=len(self._values))
        made += known
        self._draws += known
        name = f"torch.{node.target._schema.name.partition('::')[2]}"
        numbers = [self._append(value, name) for value in values]
        self._replace(node, numbers)
        self._numbers[node] = numbers[0] if len(numbers) == 1 else numbers
        return self._numbers[node]

    def foretell(self, node: fx.Node) -> None:
        """Foretells the numbers that a small result depends on, if these are all that torch draws for it."""
        if not self._heap.specialization.reads_draws or self.ended:
            return
        found = _draws_below(node)
        for each in sorted(found or ()):
            self.of_node(each)

    def listed(self, tensor: torch.Tensor) -> list[Any] | None:
        """Returns the numbers of a vector that is drawn, and foretells those that it depends on; ``None`` for another
        tensor."""
        if not self._heap.tracer.has_node(tensor):
            return None
        node = self._heap.tracer.node_of(tensor)
        self.foretell(node)
        found = self._numbers.get(node)
        return list(found) if type(found) is list else None

    def _call_of(self, node: fx.Node, arguments: Arguments) -> TorchDraw | None:
        """Returns a draw of the graph as a call of its own; ``None`` if it depends on values of tensors that are no
        constants."""
        packet = node.target.overloadpacket  # type: ignore[union-attr]
        by_number = packet is aten.bernoulli_ and not any(map(_is_tensor, node.all_input_nodes[1:]))
        by_constants = packet in _BY_CONSTANTS and all(map(may_be_constant, node.all_input_nodes))
        if not (packet in _BY_LAYOUT or by_number or by_constants) or not is_draw(node.target, node.args, node.kwargs):
            return None

        def later(arg: Any) -> Any:
            if not safe_isinstance(arg, fx.Node):
                return arg
            if not _is_tensor(arg):
                return arguments.each((arg.meta.get("val"),))[0]
            return constant_of(self._heap.tracer, arg) if by_constants else _layout_of(arg)

        args = tuple(map(later, node.args))
        kwargs = {name: None if name == "generator" else value for name, value in node.kwargs.items()}
        plain = not any(map(_has_nodes, (args, kwargs))) and not (by_constants and args[0] is None)
        return TorchDraw(None, node.target, args, kwargs) if plain else None  # type: ignore[arg-type]

    def _is_of_default(self, draw: fx.Node) -> bool:
        """Returns True for a draw from torch's default generator, named or not."""
        if draw.kwargs.get("generator") is None:
            return True
        held = self._held(draw)
        return held is None or one_generator(held, torch.default_generator)

    def _own_draws(self, node: fx.Node) -> _OwnDraws:
        """Returns the draws of the generator that a draw names."""
        held = self._held(node)
        for own in self._own.values():
            if one_generator(own.generator.held, held):
                return own
        known = [r.real for r in self._heap.by_real.values() if type(r.real) is torch.Generator]
        is_outside = any(one_generator(each, held) for each in known)
        reseeding = self._seed_of(held)
        seed = next((each.args[0] for each in self._draws if each[1] is reseeding), None) if reseeding else None
        with compat.real_world():
            generator = OwnGenerator(held, None if is_outside else held.get_state(), seed)
            self._own[id(held)] = _OwnDraws(generator)
        return self._own[id(held)]

    def _held(self, draw: fx.Node) -> Any:
        generator = draw.kwargs.get("generator")
        return getattr(self._heap.tracer.tracer.root, str(getattr(generator, "target", "")), None)

    def _is_of(self, draw: fx.Node, own: _OwnDraws | None) -> bool:
        if own is None:
            return self._is_of_default(draw)
        return not self._is_of_default(draw) and one_generator(self._held(draw), own.generator.held)

    def _foretold(self, calls: list[TorchDraw], now: Callable[[Any], Any]) -> list[Any]:
        """Returns the numbers of the last of the draws that follow those made so far; torch's generator is left."""
        generator = torch.default_generator
        with compat.real_world(), torch.no_grad():
            before = generator.get_state()
            try:
                if self._state is not None:
                    generator.set_state(self._state)
                for call in calls:
                    drawn = call(now)
                self._state = generator.get_state()
                return drawn.flatten().tolist()
            finally:
                generator.set_state(before)

    def _replace(self, node: fx.Node, numbers: list[Any]) -> None:
        """Makes the node a tensor of the numbers, or a copy of one; the draw itself stays in the graph."""
        tracer, value = self._heap.tracer, node.meta["val"]
        graph, kwargs = tracer.graph, {"dtype": value.dtype, "device": value.device, "pin_memory": False}

        def insert(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], size: Iterable[int]) -> fx.Node:
            made = graph.call_function(target, args, kwargs)
            with compat.no_recording():
                made.meta = {**node.meta, "val": value.new_empty(tuple(size))}
            return made

        in_place = node.target._schema.is_mutable  # type: ignore[union-attr]
        with graph.inserting_before(node):
            draw = graph.call_function(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
            draw.meta = dict(node.meta)
            target: Any = aten.full.default
            args: tuple[Any, ...] = (list(value.shape), tracer.node_of(numbers[0]))
            if len(numbers) > 1:
                one = aten.scalar_tensor.default
                elements = [insert(one, (tracer.node_of(each),), kwargs, ()) for each in numbers]
                target, args, kwargs = aten.stack.default, (elements,), {}
            if in_place:
                self.overwritten.add(draw)
                made = insert(target, args, kwargs, value.shape)
                target, args, kwargs = aten.copy_.default, (node.args[0], made), {}
        node.target, node.args, node.kwargs = target, args, kwargs


class _OwnDraws:
    """The draws from a generator that the step makes or gets.

    Args:
        generator: what finds its state at each call.

    Attributes:
        calls: its draws up to the last one that the prologue reads.
    """

    def __init__(self, generator: OwnGenerator) -> None:
        self.generator = generator
        self.calls: list[TorchDraw] = []
        self._copy = torch.Generator()
        self._copy.set_state(generator.held.get_state())

    def draw(self, calls: list[TorchDraw], now: Callable[[Any], Any]) -> list[Any]:
        """Returns the numbers of the last of the draws that follow those made so far."""
        with compat.real_world(), torch.no_grad():
            for call in calls:
                drawn = call(now, self._copy)
            return drawn.flatten().tolist()


def _draws_below(node: fx.Node) -> set[fx.Node] | None:
    """Returns the draws of a few numbers that a node depends on; ``None`` if it depends on another tensor than small
    results of these and of numbers."""
    found: set[fx.Node] = set()
    todo, seen = [node], {node}
    for each in todo:  # grows
        value = each.meta.get("val")
        if is_small_draw(each):
            found.add(each)
        elif not _is_small(value) or (each.op == "placeholder" and safe_isinstance(value, torch.Tensor)):
            return None
        else:
            todo += (new := set(each.all_input_nodes) - seen)
            seen |= new
    return found


def _is_small(value: Any) -> bool:
    """Returns True for a number, or a tensor of few elements, or several."""
    if type(value) in (tuple, list):
        return all(map(_is_small, value))
    if not safe_isinstance(value, torch.Tensor):
        return safe_isinstance(value, (int, float, *compat.SYMBOLS))
    return all(type(size) is int for size in value.shape) and math.prod(value.shape) <= _MOST_DRAWN


def is_number_draw(node: fx.Node) -> bool:
    """Returns True for a draw of one number on the CPU."""
    return is_small_draw(node) and node.meta["val"].numel() == 1


def is_small_draw(node: fx.Node) -> bool:
    """Returns True for a draw of one number, or of a vector of a few, on the CPU."""
    packet = getattr(node.target, "overloadpacket", None)
    value = node.meta.get("val")
    if packet not in _NUMBERS or not _is_small(value):
        return False
    if value.numel() != 1 and (value.dim() != 1 or not value.numel()):
        return False
    if any(safe_isinstance(arg, fx.Node) and _is_tensor(arg) for arg in node.args[1:]):
        return False
    if packet in _BY_CONSTANTS and not all(map(may_be_constant, node.all_input_nodes)):
        return False
    return value.device.type == "cpu" and value.dtype in (torch.float32, torch.float64, torch.int64)


def _inputs_of(node: fx.Node) -> list[fx.Node]:
    """Returns what the graph passes to a draw, but a tensor that this fills, or whose layout it takes."""
    return [arg for arg in node.args if safe_isinstance(arg, fx.Node) and not _is_tensor(arg)]  # type: ignore[misc]


def _is_tensor(node: fx.Node) -> bool:
    return safe_isinstance(node.meta.get("val"), torch.Tensor)


def _has_nodes(value: Any) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return bool(found)


def _layout_of(arg: fx.Node) -> Any:
    """Returns what stands for a tensor in a call; the node itself if its layout is not known."""
    value = arg.meta["val"]
    layout = EmptyTensor(tuple(value.shape), tuple(value.stride()), value.dtype)
    fixed = all(type(number) is int for number in (*layout.size, *layout.stride))
    return layout if fixed and value.device.type == "cpu" else arg
