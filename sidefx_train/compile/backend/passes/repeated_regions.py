"""Finds repeated regions of a graph, such as equal layers, and splits the graph between them.

A graph is a sequence of operations; a subsequence with the same operations on the same shapes, several times in a row,
is the forward, backward or update of equal layers. Splits are made before matrix products where possible: their inputs
and outputs are in memory anyway, so no fused loop is split. What is cheap to recompute (views, constants, pointwise
operations on inputs of a region) is computed in every region that uses it. Regions whose operations, constants and
shapes are equal one by one are lowered once (``region_wrapper.py``).
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.fx_utils import node_args, written_args

_SHORTEST = 12
"""Minimum of operations of a repeated region."""

_USUAL = 36
"""Number of operations up to which repetitions of a few are one region: calling one takes as long as a small kernel."""

_LEAST_SAVED = 100
"""Minimum of operations that need not be lowered: every region costs as much as lowering a dozen."""

_SHARE = 0.25
"""Minimal fraction of the graph's operations that need not be lowered."""

_LONGEST = 6
"""Limit of pointwise operations to recompute one value."""

_MOST_FORCED = 3
"""Limit of values that a region returns only because regions of its class do."""

_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "linear"))


class CannotDivide(Exception):
    """The graph must be lowered as a whole; the text says why."""


@dataclass
class Region:
    """A region of a graph.

    Attributes:
        nodes: its operations.
        items: these and what it recomputes, in order.
        takes: inputs from other regions, in the order of their first use.
        gives: positions in ``items`` of its outputs.
        window: numbers of the buffer of changing numbers that no other region reads; equal regions read them at equal
            positions of their windows.
    """

    nodes: list[fx.Node]
    items: list[fx.Node] = field(default_factory=list)
    takes: list[fx.Node] = field(default_factory=list)
    gives: tuple[int, ...] = ()
    window: Window | None = None


@dataclass(frozen=True)
class Window:
    """Consecutive elements of a vector that is an input.

    Attributes:
        vector: the input.
        first: index of the first element.
        count: number of elements.
        picks: nodes that select one of them.
    """

    vector: fx.Node
    first: int
    count: int
    picks: frozenset[fx.Node]

    @property
    def example(self) -> torch.Tensor:
        """A fake tensor like the window."""
        return self.vector.meta["val"].new_empty(self.count)  # type: ignore[no-any-return]

    def place(self, pick: fx.Node) -> int:
        """Returns the position in the window of the element that a node selects."""
        return int(pick.args[2]) - self.first  # type: ignore[arg-type]


@dataclass(frozen=True)
class Division:
    """A graph as regions.

    Attributes:
        regions: regions, in execution order.
        classes: region class: for each region the index of the first equal one.
    """

    regions: list[Region]
    classes: list[int]


def find_regions(graph: fx.Graph) -> Division | None:
    """Splits a functional graph into repeated regions; returns ``None`` if too little would be saved."""
    try:
        known = _Nodes(graph)
        cuts = _cuts(known)
        if not cuts:
            return None
        division = _divide_at(known, cuts)
    except CannotDivide:
        return None
    lowered = sum(len(division.regions[number].items) for number in set(division.classes))
    saved = sum(len(region.items) for region in division.regions) - lowered
    return division if saved >= max(_LEAST_SAVED, _SHARE * len(known.sequence)) else None


class _Nodes:
    """Properties of the nodes of a graph.

    Attributes:
        sequence: operations that compute something, in order; the write to an input follows its last reader.
        free: views and constants, which are recomputed where they are used.
        results: results of the graph.
        written: inputs that the graph writes.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.sequence: list[fx.Node] = []
        self.free: set[fx.Node] = set()
        self.results: list[fx.Node] = []
        self._constants: set[fx.Node] = set()
        writes: list[fx.Node] = []
        for node in graph.nodes:
            if node.op == "call_function" and self._constants.issuperset(node.all_input_nodes):
                self._constants.add(node)
            if node.op == "output":
                self.results = list(dict.fromkeys(node_args(node.args[0])))
            elif node.op == "placeholder":
                if not _is_plain(node.meta.get("val")):
                    raise CannotDivide(f"{node} is not a tensor with static sizes")
            elif _writes_input(node):
                writes.append(node)
            elif node.op != "call_function" or written_args(node):
                raise CannotDivide(f"{node} is not a function call")
            elif self._is_free(node):
                self.free.add(node)
            elif not _is_plain(node.meta.get("val")):
                raise CannotDivide(f"{node} has sizes of other kinds")
            else:
                self.sequence.append(node)
        self.written: set[Any] = {node.args[0] for node in writes}
        self._place(writes)

    def _place(self, writes: list[fx.Node]) -> None:
        """Puts each write behind what computes its value, and what reads the input's old one: earlier writes, too."""
        position = {node: i for i, node in enumerate(self.sequence)}
        at: dict[int, list[fx.Node]] = {}
        for write in writes:
            before = [position[node] for node in self._readers(write.args[0]) if node in position]  # type: ignore[arg-type]
            before += [position[node] for node in self._makers(write.args[1]) if node in position]  # type: ignore[arg-type]
            position[write] = max(before, default=len(self.sequence) - 1)
            at.setdefault(position[write], []).append(write)
        self.sequence = [each for i, node in enumerate(self.sequence) for each in (node, *at.get(i, ()))]

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        for user in node.users:
            if user in self.free or compat.viewed_by(user) is not None:
                yield from self._readers(user)
            yield user

    def _makers(self, node: fx.Node) -> Iterator[fx.Node]:
        if node in self.free:
            for each in node.all_input_nodes:
                yield from self._makers(each)
        yield node

    def _is_free(self, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return node.args[0] in self.free
        if not isinstance(node.target, compat.OpOverload) or compat.is_random(node.target):
            return False
        if any(result.alias_info is not None for result in node.target._schema.returns):
            return True
        inputs = node.all_input_nodes
        if not inputs:
            return node.target.namespace in ("aten", "prims")
        return is_pointwise(node) and all(each in self.free and each in self._constants for each in inputs)


def _writes_input(node: fx.Node) -> bool:
    """Returns True for the copy into an input that ends its part of a functional graph."""
    if node.target is not torch.ops.aten.copy_.default or node.users or node.kwargs:
        return False
    target, value = node.args[:2]
    return isinstance(target, fx.Node) and target.op == "placeholder" and isinstance(value, fx.Node)


def is_pointwise(node: fx.Node) -> bool:
    """Returns True if each element of the result depends only on the elements at its position."""
    target = node.target
    if not isinstance(target, compat.OpOverload) or compat.is_random(target):
        return False
    return torch.Tag.pointwise in target.tags or target is torch.ops.prims.convert_element_type.default


def _is_product(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, compat.OpOverload):
        return False
    return target.namespace in ("sidefx", "mkldnn") or target._schema.name.split("::")[1] in _PRODUCTS


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    return all(type(n) is int for n in (*value.shape, *value.stride(), value.storage_offset()))


# --- where to split ----------------------------------------------------------------------------------------------


def _cuts(known: _Nodes) -> set[int]:
    """Returns positions in the sequence before which it is split."""
    numbers: dict[Any, int] = {}
    tokens = [numbers.setdefault(_token(node), len(numbers)) for node in known.sequence]
    cuts: set[int] = set()
    free = [(0, len(tokens))]
    while free:
        low, high = free.pop()
        run = _longest_run(tokens, low, high)
        if run is None:
            continue
        start, end, period = run
        count = (end - start) // period
        slack = end - start - count * period
        first = start + min(range(slack + 1), key=lambda offset: _torn(known.sequence, start + offset, period))
        cuts |= {first + period * i for i in range(count + 1)}
        free += [(low, first), (first + period * count, high)]
    return cuts - {0, len(tokens)}


def _token(node: fx.Node) -> Any:
    def text(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _layout(value.meta.get("val"))
        if isinstance(value, (list, tuple)):
            return tuple(map(text, value))
        return repr(value)

    kwargs = tuple((name, text(value)) for name, value in sorted(node.kwargs.items()))
    return node.target, text(node.args), kwargs, _layout(node.meta.get("val"))


def _layout(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_layout, value))
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return value.dtype, tuple(value.shape), value.stride(), value.storage_offset() if value.dim() else 0


def _longest_run(tokens: Sequence[int], low: int, high: int) -> tuple[int, int, int] | None:
    """Returns start, end and period of the repetition that saves most."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for i in range(low, high):
        if tokens[i] in last:
            distances[i - last[tokens[i]]] += 1
        last[tokens[i]] = i
    best, most = None, _SHORTEST - 1
    for period, found in distances.most_common(16):
        if found <= most // 2:
            continue
        if period < _SHORTEST:
            period *= -(-_USUAL // period)  # several of few operations are one region
        start = low
        for i in range(low, high - period + 1):
            if i < high - period and tokens[i] == tokens[i + period]:
                continue
            end = i + period  # of a repetition from `start` on
            saved = ((end - start) // period - 1) * period
            if saved > most:
                best, most = (start, end, period), saved
            start = i + 1
    return best


def _torn(sequence: Sequence[fx.Node], at: int, period: int) -> tuple[int, int]:
    """Returns the cost of a split there: results of several regions separated, then values that loops share."""
    cut = at + period if at + period < len(sequence) else at
    node = sequence[cut]
    if node.target is operator.getitem:
        return 2, 0
    if _is_product(node) or (cut and _is_product(sequence[cut - 1])):
        return 0, 0
    before, near = set(sequence[max(0, cut - period) : cut]), sequence[cut : cut + period]
    return 1, len({each for user in near for each in user.all_input_nodes if each in before})


# --- inputs and outputs of regions -------------------------------------------------------------------------------


def _divide_at(known: _Nodes, cuts: set[int]) -> Division:
    while True:
        places = [0, *sorted(cuts), len(known.sequence)]
        # Inductor's passes rely on it that a graph ends with the writes to its inputs.
        regions = [Region(sorted(known.sequence[a:b], key=_writes_input)) for a, b in itertools.pairwise(places)]
        _place_results(known, regions)
        for region in regions:
            _fill(known, region)
        _give_windows(known, regions)
        classes = _region_classes(known, regions)
        alone = [count == 1 for count in map(Counter(classes).get, classes)]
        needless = {places[i + 1] for i in range(len(regions) - 1) if alone[i] and alone[i + 1]}
        if not needless:
            return Division(regions, classes)
        cuts = cuts - needless


def _place_results(known: _Nodes, regions: Sequence[Region]) -> None:
    """Assigns views and constants that the graph returns to the region of their base."""
    region_of = {node: region for region in regions for node in region.nodes}
    for node in known.results:
        if node in known.free:
            bases = [region_of[each] for each in _below(known, node) if each in region_of]
            (bases[-1] if bases else regions[-1]).nodes.append(node)


def _below(known: _Nodes, node: fx.Node) -> Iterator[fx.Node]:
    for each in node.all_input_nodes:
        if each in known.free:
            yield from _below(known, each)
        else:
            yield each


def _fill(known: _Nodes, region: Region) -> None:
    """Determines the inputs of a region, and what it recomputes."""
    inside = set(region.nodes)
    again: set[fx.Node] = set()
    region.items, region.takes = _items(region.nodes, known.free)
    taken = [node for node in region.takes if node.op != "placeholder"]
    for node in sorted(filter(is_pointwise, taken), key=taken.index):
        fixed = {each for each in taken if each is not node and each not in again}
        chain: set[fx.Node] = set()
        if _can_be_made(known, node, fixed, chain) and not chain & inside:
            again |= chain
    if again:
        region.items, region.takes = _items(region.nodes, known.free | again)
    if any(not isinstance(node.meta["val"], torch.Tensor) for node in region.takes):
        raise CannotDivide("results of one operation are in two regions")


def _give_windows(known: _Nodes, regions: Sequence[Region]) -> None:
    """Determines which elements of a vector of numbers each region reads alone."""
    readers: dict[Any, set[int]] = {}
    for number, region in enumerate(regions):
        for node in region.items:
            if _is_pick(known, node):
                readers.setdefault(node.args, set()).add(number)
    for region in regions:
        own = [node for node in region.items if len(readers.get(node.args, ())) == 1 and _is_pick(known, node)]
        places = {node.args[2] for node in own}
        if len({node.args[0] for node in own}) != 1 or max(places) - min(places) + 1 != len(places):  # type: ignore[type-var, operator]
            continue
        vector: fx.Node = own[0].args[0]  # type: ignore[assignment]
        region.window = Window(vector, min(places), len(places), frozenset(own))  # type: ignore[type-var, arg-type]
        kept = [node for node in region.items if node not in region.window.picks]
        if not any(vector in node.all_input_nodes for node in kept):
            region.takes.remove(vector)


def _is_pick(known: _Nodes, node: fx.Node) -> bool:
    """Returns True for the selection of one element of a vector that is an input, and not written."""
    if node.target is not torch.ops.aten.select.int or len(node.args) != 3 or node.args[1] != 0:
        return False
    vector, index = node.args[0], node.args[2]
    if not isinstance(vector, fx.Node) or vector.op != "placeholder" or vector in known.written:
        return False
    value = vector.meta["val"]
    return value.dim() == 1 and value.stride(0) == 1 and type(index) is int and index >= 0


def _items(nodes: Sequence[fx.Node], made: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    items: dict[fx.Node, None] = {}
    takes: dict[fx.Node, None] = {}
    members = set(nodes)

    def need(node: fx.Node) -> None:
        if node in items or node in takes:
            return
        if node in made or node in members:
            for each in node.all_input_nodes:
                need(each)
            items[node] = None
        else:
            takes[node] = None

    for node in nodes:
        need(node)
    return list(items), list(takes)


def _can_be_made(known: _Nodes, node: fx.Node, fixed: set[fx.Node], chain: set[fx.Node]) -> bool:
    """Returns True if a few pointwise operations compute a value from available ones; adds them to ``chain``."""
    chain.add(node)
    for each in node.all_input_nodes:
        bases = _below(known, each) if each in known.free else (each,)
        for base in bases:
            if base in known.written:  # it may hold another value by then
                return False
            if base.op == "placeholder" or base in fixed or base in chain:
                continue
            if not is_pointwise(base) or len(chain) >= _LONGEST or not _can_be_made(known, base, fixed, chain):
                return False
    return True


def _region_classes(known: _Nodes, regions: Sequence[Region]) -> list[int]:
    """Determines the outputs of regions, and the region classes; equal regions have equal outputs."""
    used = {node for region in regions for node in region.takes} | set(known.results)
    groups: dict[Any, list[int]] = {}
    wanted: list[set[int]] = []
    for number, region in enumerate(regions):
        members = set(region.nodes)
        wanted.append({i for i, node in enumerate(region.items) if node in members and node in used})
        groups.setdefault(_structure(region), []).append(number)
    classes = list(range(len(regions)))
    for numbers in groups.values():
        left = numbers
        while left:
            same_class = [left[0]]
            together = wanted[left[0]]
            for number in left[1:]:
                both = together | wanted[number]
                if all(len(both) - len(wanted[each]) <= _MOST_FORCED for each in (*same_class, number)):
                    same_class.append(number)
                    together = both
            for number in same_class:
                classes[number], regions[number].gives = same_class[0], tuple(sorted(together))
            left = [number for number in left if number not in same_class]
    return classes


def _structure(region: Region) -> Any:
    """Returns a key that is equal for regions that are lowered to the same code."""
    places: dict[fx.Node, tuple[str, int]] = {node: ("from outside", i) for i, node in enumerate(region.takes)}
    places |= {node: ("made", i) for i, node in enumerate(region.items)}

    def text(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return places[value]
        if isinstance(value, (list, tuple)):
            return type(value).__name__, tuple(map(text, value))
        return type(value), repr(value)

    def arguments(node: fx.Node) -> Any:
        if region.window is not None and node in region.window.picks:
            return "of the window", region.window.place(node)
        return text(node.args)

    operations = tuple(
        (
            node.target,
            arguments(node),
            tuple((k, text(v)) for k, v in sorted(node.kwargs.items())),
            _layout(node.meta["val"]),
        )
        for node in region.items
    )
    size = None if region.window is None else region.window.count
    return operations, tuple(_layout(node.meta["val"]) for node in region.takes), size
