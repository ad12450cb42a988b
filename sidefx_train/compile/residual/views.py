"""Values that share memory with an input or with each other: made again from their base by eager's own view operations.

The graph returns bases only. A view is replayed outside, on the real base, so that what later in-place changes see
(``_base``, version counter, ``grad_fn``, error texts) is what eager would have made.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from sidefx_train import _torch_compat as compat
from sidefx_train.compile.artifacts import CALLED, DATA, NO_GRAD
from sidefx_train.compile.graphs import schema_args, written_args
from sidefx_train.compile.heap.records import TensorRecord

if TYPE_CHECKING:
    from sidefx_train.compile.heap.world import TraceWorld

if not TYPE_CHECKING:
    from sidefx_train.compile.capture.kinds import isinstance


@dataclass(frozen=True)
class ViewOp:
    """One view operation.

    Attributes:
        op: the operator.
        args: its arguments; :data:`BASE` stands for the tensor that is viewed, a :class:`Number` for a number that
            the graph computes.
        kwargs: likewise.
        item: which of several views is meant.
        turns: it changes the view itself (``t_``), and makes none.
        grad: autograd was on.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None = None
    turns: bool = False
    grad: bool = True

    def __repr__(self) -> str:
        return f"{self.op}{self.args[1:]}" + ("" if self.item is None else f"[{self.item}]")


@dataclass(frozen=True)
class Number:
    """A number among those given to :func:`replay`, by position."""

    position: int


BASE: Any = type("Base", (), {"__repr__": lambda self: "base"})()


@dataclass(frozen=True)
class Path:
    """How a value is made from its base.

    Attributes:
        base: fake tensor, or the graph node of one that nothing but its views refers to.
        ops: what to do with it.
        numbers: graph nodes of numbers that the operations take.
        grad: whether autograd has recorded the views.
        version: its version, where that does not follow from the base's.
        apart: eager does not take the value for a view, though it is in the base's memory.
        creation: how autograd is to take the view to have come to be, where the operations do not say it.
        unsafe: an operation is among them of which autograd does not know that it makes views (``unsafe_split``).
        anew: its memory was written after it was made: autograd makes its history anew, from the base of its base, once
            it is asked for it; ``"asked"`` if the step has done so.
    """

    base: torch.Tensor | fx.Node
    ops: tuple[ViewOp, ...]
    numbers: tuple[fx.Node, ...]
    grad: bool
    version: int | None = None
    apart: bool = False
    creation: Any = None
    unsafe: bool = False
    anew: Literal["", "unasked", "asked"] = ""


@dataclass(frozen=True)
class LiveView:
    """A view from which another value that leaves was computed: the backward passes through it.

    Attributes:
        value: its fake tensor.
        base: what it is made from: an input, a result of the graph, or an earlier such view.
        path: how; nothing is to be done for one from outside, of which autograd makes the history anew.
        numbers: positions of the numbers of ``path`` among the results.
        position: of one from outside, among the inputs.
    """

    value: torch.Tensor
    base: tuple[Literal["input", "result", "view"], int]
    path: Path | None
    numbers: tuple[int, ...] = ()
    position: int | None = None


@dataclass(frozen=True)
class CustomView:
    """A view of a tensor from outside that a custom autograd function made, and that leaves.

    Attributes:
        name: of its node in the autograd graph.
        base: what it is a view of.
        path: how it is made of that.
        numbers: positions of the numbers of ``path`` among the results.
    """

    name: str
    base: tuple[Literal["input", "result", "view"], int]
    path: Path
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Leaving:
    """What one pass over all that leaves a step teaches the next.

    Attributes:
        shared: storages that several values leave in.
        passed: views, by their nodes, from which other values that leave were computed.
        replayed: views that autograd knows, in the order in which the step made them.
        counters: ``.data`` of tensors, by their nodes: they have version counters of their own.
        staged: a backward leaves too: such views are made between its stages.
    """

    shared: frozenset[int] = frozenset()
    passed: Mapping[fx.Node, torch.Tensor] = field(default_factory=dict)
    replayed: tuple[torch.Tensor, ...] = ()
    counters: Mapping[fx.Node, torch.Tensor] = field(default_factory=dict)
    staged: bool = False

    def known(self) -> tuple[object, ...]:
        """What to compare: each pass knows at least what the one before it knew."""
        return self.shared, frozenset(self.passed), tuple(map(id, self.replayed)), frozenset(self.counters), self.staged


def replay(
    base: torch.Tensor,
    ops: tuple[ViewOp, ...],
    grad: bool,
    numbers: tuple[int, ...] = (),
    version: int | None = None,
    apart: bool = False,
    creation: Any = None,
    anew: Literal["", "unasked", "asked"] = "",
) -> torch.Tensor:
    """The view of ``base`` that a sequence of operations makes; called by generated code."""
    before = torch.is_grad_enabled()
    turned = bool(anew) or (not grad and any(each.turns for each in ops))
    counted = base._version if turned else 0
    try:
        value: Any = base
        if anew:  # the view is of another version, and autograd is not asked for the history of ``base``
            compat.set_version(base, counted + 1)
        for each in ops:
            compat.set_grad_enabled(each.grad and not anew)
            args = [value if a is BASE else _given(a, numbers) for a in each.args]
            kwargs = {name: _given(a, numbers) for name, a in each.kwargs.items()}
            value = each.op(*args, **kwargs)
            if each.item is not None:
                value = value[each.item]
    finally:
        compat.set_grad_enabled(before)
    if turned:  # that has been counted; autograd would notice where it is taken back
        compat.set_version(base, counted)
    if apart:
        value = compat.alias_unseen(value)
    if creation is not None:
        compat.set_creation(value, creation)
    elif anew:
        compat.set_creation(value, compat.creation_of(base) or compat.PLAIN_VIEW)
    if version is not None:
        compat.set_version(value, version)
    if anew == "asked":
        value.grad_fn  # noqa: B018
    return value  # type: ignore[no-any-return]


def _given(value: Any, numbers: tuple[int, ...]) -> Any:
    if isinstance(value, Number):
        return numbers[value.position]
    if type(value) in (list, tuple):
        return type(value)(_given(item, numbers) for item in value)
    return value


class Views:
    """Finds bases.

    Args:
        world: the capture.
        leaving: what is known of all that leaves.
    """

    def __init__(self, world: TraceWorld, leaving: Leaving) -> None:
        self.world = world
        self.shared = leaving.shared
        self.passed = {**leaving.counters, **leaving.passed}
        self.counters: dict[fx.Node, torch.Tensor] = {}
        self.between: dict[fx.Node, torch.Tensor] = {}
        self._counted: dict[fx.Node, set[fx.Node]] = {}
        records = [r for r in world.heap.by_real.values() if isinstance(r, TensorRecord)]
        placeholder = {
            id(real): node for real, node in zip(world.tracer.real_inputs, world.tracer.placeholders, strict=True)
        }
        self._records = {placeholder[id(r.real)]: r for r in records}
        self._outside = {storage_of(r.memory) for r in records}

    def path(self, value: torch.Tensor, node: fx.Node, custom: bool = False) -> Path | None:
        """How to make ``value`` outside, or ``None`` if the graph is to return it as it is.

        Args:
            value: what leaves.
            node: its node.
            custom: a custom autograd function made it a view: its history is not asked for.
        """
        self._unturned: ViewOp | None = None
        storage = storage_of(value)
        if not (value._is_view() or storage in self._outside or storage in self.shared) or value.is_inference():
            return None
        up = _way_up(node)
        base, below = self._base(value, up)
        self._note_counter(value, below)
        if base is not None and base is value._base and self.world.heap.record_of(base) is None:
            made_by = first_of(self.world.tracer.node_of(base))
            if DATA not in made_by.meta and _counts_alone(made_by):
                self.counters[made_by] = base
        step = next((i for i, n in enumerate(below) if i and self.passed.get(n, value) is not value), None)
        if step is not None:
            base, below = self.passed[below[step]], below[:step]
        if base is None or not below or not any(_replayed(each) for each in below):
            return None
        ops: list[ViewOp] = [] if self._unturned is None else [self._unturned]
        numbers: list[fx.Node] = []
        for each in reversed(below):
            if each.target is not operator.getitem and _replayed(each):
                item = next((n.args[1] for n in below if n.target is operator.getitem and n.args[0] is each), None)
                ops.append(_view_op(each, item, numbers))
        own = isinstance(base, fx.Node) or not compat.one_counter(value, base)
        apart = not value.requires_grad and not value._is_view() and not any(_leaves_autograd(n) for n in below)
        if not isinstance(base, fx.Node):  # one that shares its counter was made by an operation that is replayed
            apart = own and not any(DATA in n.meta for n in below)
        if any(n.meta.get(NO_GRAD) == "inference" for n in below):
            self.world.heap.refuse("SFX111", "a view made in inference mode leaves the step")
        if any(NO_GRAD in n.meta for n in below) and any(map(_changes_layout, below)):
            self.world.heap.refuse("SFX107", "a view made with autograd off of one that was turned leaves the step")
        if any(NO_GRAD in n.meta for n in below) and self._written_elsewhere(base):
            self.world.heap.refuse("SFX107", "a view made with autograd off leaves the step; its memory was written")
        grad = not custom and value.grad_fn is not None
        if grad and any(_repeats_elements(n.meta["val"]) for n in below) and self._written_since(node):
            reason = "a view that shows elements several times leaves the step; its base was written after it was made"
            self.world.heap.refuse("SFX111", reason)  # autograd takes it for another kind of view then
        if grad:
            self.between |= {n: kept for n in below[1:] if (kept := self._kept(n)) is not None}
        unsafe = any(CALLED in n.meta for n in below)
        version = value._version if own else None
        anew = self._anew(value, node, base) if grad and isinstance(base, torch.Tensor) else ""
        path = Path(base, tuple(ops), tuple(numbers), grad, version, apart, unsafe=unsafe, anew=anew)
        return self._held(path, value, custom)

    def _anew(self, value: torch.Tensor, node: fx.Node, base: torch.Tensor) -> Literal["", "unasked", "asked"]:
        """Whether autograd has made the history of a view anew, or is to."""
        if not self._written_since(first_of(node), turned=True):
            return ""
        if self._unturned is None and (not base._is_view() or edge_of(base) in edges_behind(value)):
            return ""
        return "asked" if node.users else "unasked"

    def _kept(self, node: fx.Node) -> torch.Tensor | None:
        """The view that a node made, if it is still what it was."""
        kept = self.world.tracer.views.get(node)
        if kept is None or self.world.tracer.node_of(kept) is not node:
            return None
        try:
            if not kept._is_view() or kept.grad_fn is None:
                return None
        except RuntimeError:  # autograd forbids some views of several to be looked at: nothing is made of those
            return None
        return kept if _same_layout(node.meta.get("val"), kept) else None

    def _note_counter(self, value: torch.Tensor, below: list[fx.Node]) -> None:
        """What shares the counter of a ``.data`` that leaves too is made from that, not from what it is the data of.

        ``unsafe_split`` gives counters of their own as well.
        """
        data = next((each for each in below if _counts_alone(each)), None)
        if data is None:
            return
        if data is below[0]:
            self.counters[data] = value
        else:
            self._counted.setdefault(data, set()).add(below[0])

    def check_counters(self) -> None:
        """Refuses several values that share a counter which nothing else that leaves has."""
        if any(len(values) > 1 and data not in self.counters for data, values in self._counted.items()):
            self.world.heap.refuse(
                "SFX111", "views of a tensor's .data leave the step together, without what they view"
            )

    def counted(self) -> frozenset[fx.Node]:
        """What gave a counter of its own to something that leaves."""
        return frozenset((*self.counters, *self._counted))

    def is_outside(self, value: torch.Tensor) -> bool:
        """True for a value in the memory of an input; the graph's own results are not."""
        if value.is_inference():
            return False
        return storage_of(value) in self._outside

    def _base(self, value: torch.Tensor, up: list[fx.Node]) -> tuple[Any, list[fx.Node]]:
        """What ``value`` is a view of, and the nodes from ``value`` up to it."""
        record = self._records.get(up[-1])
        base = value._base if value._is_view() else None
        tracer = self.world.tracer
        moved = None if base is None else self.world.heap.record_of(base)
        if not value._is_view():  # detached from it, perhaps
            moved = self._counted_with(value, up)
        moved = self._enlarged(value) or moved
        if isinstance(moved, TensorRecord) and moved.home is not None:
            return moved.shadow, self._below_moved(moved, up)
        if base is not None and not (tracer.has_node(base) and self._made(base, up)):
            base = None
        if record is not None and base is None:
            if record.shadow.requires_grad != record.requires_grad and record.shadow.grad_fn is None:
                return None, []
            memory = record.shadow if record.returned else record.memory
            return memory, _below(up, up[-1], memory) or self._before_turns(record, up, value)
        if base is not None:
            below = _below(up, first_of(tracer.node_of(base)), base)
            if below:
                return base, below
            self._refuse_turned_base(value)
            return _unturned(up, first_of(tracer.node_of(base)))
        if value.requires_grad or up[-1].op != "call_function":
            return None, []
        if not any(_leaves_autograd(n) for n in up):
            return None, []
        last = up[-1]
        while (later := next((n for n in last.users if _in_place(n) and written_args(n)[0] is last), None)) is not None:
            if _changes_layout(later):
                self._refuse_turned_base(value)
                return None, []
            last = later
        return last, _below(up, up[-1], last.meta["val"])

    def _before_turns(self, record: TensorRecord, up: list[fx.Node], value: torch.Tensor) -> list[fx.Node]:
        """The nodes of a view that was made of a tensor from outside before that was turned (``t_``)."""
        place = len(up) - 1
        while place > 0 and _in_place(up[place - 1]):
            place -= 1
        was, now = up[place].meta.get("val"), record.shadow
        if place == 0 or record.home is not None or not isinstance(was, torch.Tensor) or was.dtype != now.dtype:
            return []
        if value.grad_fn is not None and _kind(value) != _kind(now):  # autograd makes it anew otherwise
            return []
        size, stride, offset = _layout(was)
        distance = offset - now.storage_offset()
        if not all(isinstance(n, int) for n in (*size, *stride, distance)):
            return []
        self._unturned = ViewOp(_seen_as, (BASE, size, stride, distance), {})
        return up[:place]

    def _counted_with(self, value: torch.Tensor, up: list[fx.Node]) -> TensorRecord | None:
        """The tensor from outside, given other memory in the step, whose version counter ``value`` has."""
        for record in self.world.heap.memory.replaced():
            if compat.one_counter(value, record.shadow):
                home = up[-1] is self.world.tracer.node_of(record.home) or self._records.get(up[-1]) is record
                return None if home and first_of(self.world.tracer.node_of(record.shadow)) not in up else record
        return None

    def _enlarged(self, value: torch.Tensor) -> TensorRecord | None:
        """The tensor from outside in whose enlarged memory ``value`` is: that is its own, not the graph's result."""
        known = [record for record in self.world.heap.memory.replaced() if record.grown and record.given is not value]
        return next((record for record in known if storage_of(record.shadow) == storage_of(value)), None)

    def _below_moved(self, record: TensorRecord, up: list[fx.Node]) -> list[fx.Node]:
        """The nodes of a view that come after the tensor from outside of which it is one, in its new memory."""
        first = first_of(self.world.tracer.node_of(record.shadow))
        below = _below(up, first, record.shadow) or (_below(up, up[-1], record.shadow) if record.returned else [])
        if not below:
            reason = f"a view of {record.source.label} leaves the step, which was given other memory (.data) since"
            self.world.heap.refuse("SFX111", reason)
        return below

    def _refuse_turned_base(self, value: torch.Tensor) -> None:
        """A view of what a tensor was before it was turned has nothing to be made from, where that leaves too."""
        if value.requires_grad or storage_of(value) in self.shared | self._outside:
            reason = "a view leaves the step whose base is turned in place after it was made"
            self.world.heap.refuse("SFX111", reason)

    def _written_since(self, node: fx.Node, turned: bool = False) -> bool:
        """True if a node writes, after ``node``, to the memory that its value is in, or turns what is in it."""
        memory = _memory(node)
        later = node.next
        while later.op not in ("root", "output"):
            counts = turned or not _changes_layout(later)
            if counts and any(_memory(written) == memory for written in written_args(later)):
                return True
            later = later.next
        return False

    def _written_elsewhere(self, base: torch.Tensor | fx.Node) -> bool:
        """True if an input was written that shares memory with ``base`` in a way that stand-ins do not know of."""
        if isinstance(base, fx.Node) or not base.requires_grad:
            return False
        records = [r for r in self._records.values() if storage_of(r.memory) == storage_of(base)]
        return any(r.version != r.entry_version and not compat.one_counter(r.shadow, base) for r in records)

    def _made(self, base: torch.Tensor, up: list[fx.Node]) -> bool:
        """True for a base that the step made itself."""
        return self.world.heap.record_of(base) is None and first_of(self.world.tracer.node_of(base)) in up

    def _held(self, path: Path, value: torch.Tensor, custom: bool) -> Path | None:
        """The path, if following it on the fake base gives what the capture has."""
        if path.grad and not self._plain_history(value, path.base):
            return None
        numbers = tuple(node.meta["val"] for node in path.numbers)
        # One that nothing but views refers to is turned by what is replayed; what the graph says of it stays as it is.
        base = compat.fake_snapshot(path.base.meta["val"]) if isinstance(path.base, fx.Node) else path.base
        version = base._version
        try:
            with compat.no_recording():
                made = replay(base, path.ops, path.grad, numbers, path.version, path.apart, anew=path.anew)
        except (RuntimeError, IndexError, ValueError):  # what was viewed has been resized since
            return None
        finally:
            compat.set_version(base, version)
        if (
            not path.grad and not custom and made.grad_fn is not None
        ):  # the base began to require gradients after it was viewed
            return None
        if path.grad and not path.anew and base is not value._base and _name(made) != _name(value):
            return None  # memory changed behind autograd's back: it does not take the value for a view of this one
        if _facts(made, new_leaf(value)) != _facts(value):
            return None
        if custom:
            return path
        creation = compat.creation_of(value)  # a custom function with autograd off leaves no other trace
        return path if creation == compat.creation_of(made) else replace(path, creation=creation)

    def _plain_history(self, value: torch.Tensor, base: torch.Tensor | fx.Node) -> bool:
        """True if autograd knows the value by view operations alone: no custom function, no hook in between."""
        stop = base.grad_fn if isinstance(base, torch.Tensor) else None
        todo, seen = [value.grad_fn], set()
        while todo:
            fn = todo.pop()
            if fn is None or fn is stop or fn in seen:
                continue
            seen.add(fn)
            if isinstance(fn, torch.autograd.function.BackwardCFunction) or fn in self.world.hooked:
                return False
            todo += [following for following, _ in fn.next_functions]
        return True


def storage_of(value: torch.Tensor) -> int:
    """What tells a fake tensor's memory from that of others."""
    return int(value.untyped_storage()._cdata) if value.layout is torch.strided else id(value)


def edge_of(value: torch.Tensor) -> tuple[Any, int]:
    """What leads to a tensor in the autograd graph: the node that made it, and which of its outputs it is."""
    return value.grad_fn, value.output_nr


def first_operation(value: torch.Tensor, base: torch.Tensor | fx.Node) -> int:
    """The place, in the order of the forward, of what a view made of its base first."""
    stop = base.grad_fn if isinstance(base, torch.Tensor) else None
    node, first = value.grad_fn, -1
    while node is not None and node is not stop and not hasattr(node, "variable"):
        first = node._sequence_nr()  # type: ignore[attr-defined]
        node = node.next_functions[0][0] if node.next_functions else None
    return first


def edges_behind(value: torch.Tensor) -> set[tuple[Any, int]]:
    """Edges of all tensors that a tensor was computed from."""
    found: set[tuple[Any, int]] = set()
    seen: set[Any] = set()
    waiting = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.update(node.next_functions)
            waiting += [before for before, _ in node.next_functions]
    return found


def _way_up(node: fx.Node) -> list[fx.Node]:
    """The node, what it is a view of, and so on to the one that made the memory."""
    way = [node]
    while (parent := _parent(way[-1])) is not None:
        way.append(parent)
    return way


def _memory(node: fx.Node) -> int:
    """What tells the memory of a node's value from that of others."""
    value = node.meta.get("val")
    return storage_of(value) if isinstance(value, torch.Tensor) else id(node)


def _parent(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source = node.args[0]
        known = isinstance(source, fx.Node) and isinstance(source.target, compat.OpOverload)
        return source if known and _parent(source) is not None else None  # type: ignore[arg-type, return-value]
    if not isinstance(node.target, compat.OpOverload) or not any(r.alias_info for r in node.target._schema.returns):
        return None
    shared = [value for argument, value in schema_args(node) if argument.alias_info is not None]
    return shared[0] if len(shared) == 1 and isinstance(shared[0], fx.Node) else None


def first_of(node: fx.Node) -> fx.Node:
    """The node that made the tensor which in-place operations returned since."""
    while _in_place(node):
        node = written_args(node)[0]
    return node


def _in_place(node: fx.Node) -> bool:
    """True for an operation that returns the tensor it writes to."""
    return bool(written_args(node)) and _parent(node) is not None


def _leaves_autograd(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.detach.default or DATA in node.meta


def _counts_alone(node: fx.Node) -> bool:
    """True for a node whose value is in the memory of another, with a version counter of its own."""
    made_by = node.args[0] if node.target is operator.getitem else node
    return DATA in node.meta or (isinstance(made_by, fx.Node) and made_by is not node and CALLED in made_by.meta)


def own_counter(node: fx.Node) -> fx.Node | None:
    """The node from which on a value has another version counter than the memory that it is in."""
    return next((each for each in _way_up(node) if _counts_alone(each)), None)


def _changes_layout(node: fx.Node) -> bool:
    return isinstance(node.target, compat.OpOverload) and torch.Tag.inplace_view in node.target.tags


def _replayed(node: fx.Node) -> bool:
    """True for what makes or turns a view; writes have been done by the graph."""
    return not _in_place(node) or _changes_layout(node)


def _below(up: list[fx.Node], first: fx.Node, base: torch.Tensor) -> list[fx.Node]:
    """Nodes of the way up that come after ``base``, whose first node is ``first``; none if they do not fit."""
    if first not in up:
        return []
    place = up.index(first)
    while place > 0 and _in_place(up[place - 1]):
        place -= 1
    if not _same_layout(up[place].meta.get("val"), base):
        return []  # the base was turned after the view was made
    return up[:place]


def _unturned(up: list[fx.Node], first: fx.Node) -> tuple[Any, list[fx.Node]]:
    """A base that nothing but its views refers to, as it was before it was turned, and the nodes that come after."""
    place = up.index(first)
    while place > 0 and _in_place(up[place - 1]) and not _changes_layout(up[place - 1]):
        place -= 1
    return up[place], up[:place]


def _same_layout(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and _layout(a) == _layout(b)


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(t.shape), tuple(t.stride()), t.storage_offset())


def _kind(t: torch.Tensor) -> tuple[Any, ...]:
    return t.dtype, t.is_conj(), t.is_neg()


def _name(t: torch.Tensor) -> str:
    return "" if t.grad_fn is None else t.grad_fn.name()


def _facts(t: torch.Tensor, begins: bool = False) -> tuple[Any, ...]:
    """What must come out as it was; eager's own operations choose the strides of dimensions of size 1, outside."""
    size, stride, offset = _layout(t)
    stride = tuple(None if type(n) is int and n == 1 else step for n, step in zip(size, stride, strict=True))
    return (size, stride, offset, t.dtype, t.is_conj(), t.is_neg(), begins or t.requires_grad, t._is_view())


def new_leaf(t: torch.Tensor) -> bool:
    """True for a tensor that has no history and requires gradients: that was asked of it after it was made."""
    return t.requires_grad and t.grad_fn is None


def _repeats_elements(t: Any) -> bool:
    """True for a view with an element in several places, as ``expand`` and ``unfold`` make them."""
    if not isinstance(t, torch.Tensor):
        return False
    dims = sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _view_op(node: fx.Node, item: Any, numbers: list[fx.Node]) -> ViewOp:
    viewed = _parent(node)

    def named(value: fx.Node) -> Any:
        if value is viewed:
            return BASE
        if value not in numbers:
            numbers.append(value)
        return Number(numbers.index(value))

    grad = NO_GRAD not in node.meta
    if DATA in node.meta:
        return ViewOp(_data, (BASE,), {}, grad=grad)
    args, kwargs = fx.map_arg(node.args, named), fx.map_arg(node.kwargs, named)
    named_args = {k: _plain(a) for k, a in kwargs.items()}
    return ViewOp(
        node.meta.get(CALLED, node.target),
        tuple(_plain(a) for a in args),
        named_args,
        item,
        _changes_layout(node),
        grad,
    )


def _data(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data


def _seen_as(tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], distance: int) -> torch.Tensor:
    """A view of a tensor's memory that begins ``distance`` elements behind the tensor."""
    return tensor.as_strided(size, stride, tensor.storage_offset() + distance)


def _plain(value: Any) -> Any:
    """Lists of a graph are immutable ones of its own."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
