"""Values that share memory with an input or with each other: made again from their base by eager's own view operations.

The graph returns bases only. A view is replayed outside, on the real base, so that what later in-place changes see
(``_base``, version counter, ``grad_fn``, error texts) is what eager would have made.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.artifacts import CALLED, DATA, NO_GRAD
from sidefx_train.compile.graph.fx_utils import written_args
from sidefx_train.compile.graph.view_chains import (
    STRIDED,
    before_metadata_mutations,
    below_base,
    changes_layout,
    counted_since,
    counts_alone,
    first_of,
    gradient_edge,
    gradient_edges_behind,
    is_in_place,
    is_replayed,
    last_counted,
    layout_of,
    leaves_autograd,
    parent_of,
    same_layout,
    way_up,
    written_since,
)
from sidefx_train.compile.residual.view_replay import BASE, KnownOutputs, Number, Path, ViewOp, data_of, replay, seen_as

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


class Views:
    """Finds bases.

    Args:
        world: the capture.
        leaving: what is known of all that leaves.
    """

    def __init__(self, world: TraceWorld, leaving: KnownOutputs) -> None:
        self.world = world
        self.shared = leaving.shared
        self.passed = {**leaving.counters, **leaving.passed}
        self.counters: dict[fx.Node, torch.Tensor] = {}
        self.between: dict[fx.Node, torch.Tensor] = {}
        self._counted: dict[fx.Node, set[fx.Node]] = {}
        records = [r for r in world.heap.by_real.values() if safe_isinstance(r, TensorRecord)]
        placeholder = {
            id(real): node for real, node in zip(world.tracer.real_inputs, world.tracer.placeholders, strict=True)
        }
        self._records = {placeholder[id(r.real)]: r for r in records}
        self._outside = {compat.storage_id(r.memory) for r in records}

    def path(self, value: torch.Tensor, node: fx.Node, custom: bool = False) -> Path | None:
        """How to make ``value`` outside, or ``None`` if the graph is to return it as it is.

        Args:
            value: what leaves.
            node: its node.
            custom: a custom autograd function made it a view: its history is not asked for.
        """
        self._before_mutation: ViewOp | None = None
        storage = compat.storage_id(value)
        if not (value._is_view() or storage in self._outside or storage in self.shared) or value.is_inference():
            return None
        up = way_up(node)
        base, below = self._base(value, up)
        self._note_counter(value, below if base is not None else [first_of(node)])
        if base is not None and base is value._base and self.world.heap.record_of(base) is None:
            made_by = first_of(self.world.tracer.node_of(base))
            if DATA not in made_by.meta and counts_alone(made_by):
                self.counters[made_by] = base
        step = next((i for i, n in enumerate(below) if i and self.passed.get(n, value) is not value), None)
        if step is not None:
            base, below = self.passed[below[step]], below[:step]
        if base is None or not below or not any(is_replayed(each) for each in below):
            return None
        ops: list[ViewOp] = [] if self._before_mutation is None else [self._before_mutation]
        numbers: list[fx.Node] = []
        for each in reversed(below):
            if each.target is not operator.getitem and is_replayed(each):
                item = next((n.args[1] for n in below if n.target is operator.getitem and n.args[0] is each), None)
                ops.append(_view_op(each, item, numbers))
        own = safe_isinstance(base, fx.Node) or not compat.share_version_counter(value, base)
        unrelated = not value.requires_grad and not value._is_view() and not any(leaves_autograd(n) for n in below)
        if not safe_isinstance(base, fx.Node):  # one that shares its counter was made by an operation that is replayed
            unrelated = own and not any(DATA in n.meta for n in below)
        if any(n.meta.get(NO_GRAD) == "inference" for n in below):
            self.world.heap.refuse("SFX111", "a view made in inference mode leaves the step")
        if any(NO_GRAD in n.meta for n in below) and any(map(changes_layout, below)):
            self.world.heap.refuse("SFX107", "a view made with autograd off of one that was turned leaves the step")
        if any(NO_GRAD in n.meta for n in below) and self._written_elsewhere(base):
            self.world.heap.refuse("SFX107", "a view made with autograd off leaves the step; its memory was written")
        grad = not custom and value.grad_fn is not None
        if grad and any(_repeats_elements(n.meta["val"]) for n in below) and written_since(node):
            reason = "a view that shows elements several times leaves the step; its base was written after it was made"
            self.world.heap.refuse("SFX111", reason)  # autograd takes it for another kind of view then
        if grad:
            self.between |= {n: kept for n in below[1:] if (kept := self._kept(n)) is not None}
        unsafe = any(CALLED in n.meta for n in below)
        version = value._version if own else None
        regenerates_grad_fn = (
            self._regenerated(value, node, base, below) if grad and safe_isinstance(base, torch.Tensor) else ""
        )
        path = Path(
            base,
            tuple(ops),
            tuple(numbers),
            grad,
            version,
            unrelated,
            unsafe=unsafe,
            regenerates_grad_fn=regenerates_grad_fn,
        )
        return self._held(path, value, custom)

    def _regenerated(
        self, value: torch.Tensor, node: fx.Node, base: torch.Tensor, below: list[fx.Node]
    ) -> Literal["", "unasked", "asked"]:
        """Whether autograd has made the history of a view anew, or is to; or that of what it is a view of."""
        if not counted_since(below[-1]):
            return ""
        late = base._is_view() and gradient_edge(base) not in gradient_edges_behind(value)
        if any(each.target in STRIDED for each in below):  # its derivative goes by what it is made of
            mutates_metadata = frozenset(filter(changes_layout, below))
            made = next(each for each in below if is_replayed(each))
            if not counted_since(made):
                if late or counted_since(below[-1], besides=mutates_metadata):
                    reason = "a view by as_strided leaves the step, which autograd has made anew in between"
                    self.world.heap.refuse("SFX107", reason)
                return ""
        elif self._before_mutation is None and not late:
            return ""
        return "asked" if self._is_asked(node) else "unasked"

    def _is_asked(self, node: fx.Node) -> bool:
        """True if the step asks for the history of a view after the last write to its memory, or writes to it last."""
        last = last_counted(node)
        return last is node or any(user > last for user in node.users)

    def _kept(self, node: fx.Node) -> torch.Tensor | None:
        """The view that a node made or wrote last, if it is still what it was."""
        kept = self.world.tracer.views.get(first_of(node))
        if kept is None or self.world.tracer.node_of(kept) is not node:
            return None
        try:
            if not kept._is_view() or kept.grad_fn is None:
                return None
        except RuntimeError:  # autograd forbids some views of several to be looked at: nothing is made of those
            return None
        return kept if same_layout(node.meta.get("val"), kept) else None

    def _note_counter(self, value: torch.Tensor, below: list[fx.Node]) -> None:
        """What shares the counter of a ``.data`` that leaves too is made from that, not from what it is the data of.

        ``unsafe_split`` gives counters of their own as well.
        """
        data = next((each for each in below if counts_alone(each)), None)
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
        return compat.storage_id(value) in self._outside

    def _base(self, value: torch.Tensor, up: list[fx.Node]) -> tuple[Any, list[fx.Node]]:
        """What ``value`` is a view of, and the nodes from ``value`` up to it."""
        record = self._records.get(up[-1])
        base = value._base if value._is_view() else None
        tracer = self.world.tracer
        moved = None if base is None else self.world.heap.record_of(base)
        if not value._is_view():  # detached from it, perhaps
            moved = self._counted_with(value, up)
        moved = self._enlarged(value) or moved
        if safe_isinstance(moved, TensorRecord) and moved.home is not None:
            if _of_another_time(moved, value):
                reason = f"a view of {moved.source.label} leaves the step, which ceases to require gradients"
                self.world.heap.refuse("SFX111", reason)
            return moved.shadow, self._below_moved(moved, up)
        if base is not None and not (tracer.has_node(base) and self._made(base, up)):
            base = None
        if record is not None and base is None:
            if _of_another_time(record, value):
                return None, []
            memory = record.shadow if record.returned else record.memory
            return memory, below_base(up, up[-1], memory) or self._before_metadata_mutations(record, up, value)
        if base is not None:
            below = below_base(up, first_of(tracer.node_of(base)), base)
            if below:
                return base, below
            self._refuse_metadata_mutated_base(value)
            return before_metadata_mutations(up, first_of(tracer.node_of(base)))
        if value.requires_grad or up[-1].op != "call_function":
            return None, []
        if not any(leaves_autograd(n) for n in up):
            return None, []
        last = up[-1]
        while (
            later := next((n for n in last.users if is_in_place(n) and written_args(n)[0] is last), None)
        ) is not None:
            if changes_layout(later):
                self._refuse_metadata_mutated_base(value)
                return None, []
            last = later
        return last, below_base(up, up[-1], last.meta["val"])

    def _before_metadata_mutations(self, record: TensorRecord, up: list[fx.Node], value: torch.Tensor) -> list[fx.Node]:
        """The nodes of a view that was made of a tensor from outside before that was turned (``t_``)."""
        place = len(up) - 1
        while place > 0 and is_in_place(up[place - 1]):
            place -= 1
        was, now = up[place].meta.get("val"), record.shadow
        if place == 0 or record.home is not None or not safe_isinstance(was, torch.Tensor) or was.dtype != now.dtype:
            return []
        if value.grad_fn is not None and _kind(value) != _kind(now):  # autograd makes it anew otherwise
            return []
        size, stride, offset = layout_of(was)
        distance = offset - now.storage_offset()
        if not all(safe_isinstance(n, int) for n in (*size, *stride, distance)):
            return []
        self._before_mutation = ViewOp(seen_as, (BASE, size, stride, distance), {})
        return up[:place]

    def _counted_with(self, value: torch.Tensor, up: list[fx.Node]) -> TensorRecord | None:
        """The tensor from outside, given other memory in the step, whose version counter ``value`` has."""
        for record in self.world.heap.memory.replaced():
            if compat.share_version_counter(value, record.shadow):
                home = up[-1] is self.world.tracer.node_of(record.home) or self._records.get(up[-1]) is record
                return None if home and first_of(self.world.tracer.node_of(record.shadow)) not in up else record
        return None

    def _enlarged(self, value: torch.Tensor) -> TensorRecord | None:
        """The tensor from outside in whose enlarged memory ``value`` is: that is its own, not the graph's result."""
        known = [record for record in self.world.heap.memory.replaced() if record.grown and record.given is not value]
        return next((record for record in known if compat.storage_id(record.shadow) == compat.storage_id(value)), None)

    def _below_moved(self, record: TensorRecord, up: list[fx.Node]) -> list[fx.Node]:
        """The nodes of a view that come after the tensor from outside of which it is one, in its new memory."""
        shadow = record.shadow
        below = below_base(up, first_of(self.world.tracer.node_of(shadow)), shadow)
        if not below and record.returned:
            below = below_base(up, up[-1], shadow)
        if not below:
            reason = f"a view of {record.source.label} leaves the step, which was given other memory (.data) since"
            self.world.heap.refuse("SFX111", reason)
        return below

    def _refuse_metadata_mutated_base(self, value: torch.Tensor) -> None:
        """A view of what a tensor was before it was turned has nothing to be made from, where that leaves too."""
        if value.requires_grad or compat.storage_id(value) in self.shared | self._outside:
            reason = "a view leaves the step whose base is turned in place after it was made"
            self.world.heap.refuse("SFX111", reason)

    def _written_elsewhere(self, base: torch.Tensor | fx.Node) -> bool:
        """True if an input was written that shares memory with ``base`` in a way that stand-ins do not know of."""
        if safe_isinstance(base, fx.Node) or not base.requires_grad:
            return False
        records = [r for r in self._records.values() if compat.storage_id(r.memory) == compat.storage_id(base)]
        return any(r.version != r.entry_version and not compat.share_version_counter(r.shadow, base) for r in records)

    def _made(self, base: torch.Tensor, up: list[fx.Node]) -> bool:
        """True for a base that the step made itself."""
        return self.world.heap.record_of(base) is None and first_of(self.world.tracer.node_of(base)) in up

    def _held(self, path: Path, value: torch.Tensor, custom: bool) -> Path | None:
        """The path, if following it on the fake base gives what the capture has."""
        if path.grad and not self._plain_history(value, path.base):
            return None
        numbers = tuple(node.meta["val"] for node in path.numbers)
        # One that nothing but views refers to is turned by what is replayed; what the graph says of it stays as it is.
        base = compat.fake_snapshot(path.base.meta["val"]) if safe_isinstance(path.base, fx.Node) else path.base
        version = base._version
        try:
            with compat.no_recording():
                made = replay(
                    base,
                    path.ops,
                    path.grad,
                    numbers,
                    path.version,
                    path.unrelated,
                    regenerates_grad_fn=path.regenerates_grad_fn,
                )
        except (RuntimeError, IndexError, ValueError):  # what was viewed has been resized since
            return None
        finally:
            compat.set_version(base, version)
        if (
            not path.grad and not custom and made.grad_fn is not None
        ):  # the base began to require gradients after it was viewed
            return None
        if path.grad and not path.regenerates_grad_fn and base is not value._base and _name(made) != _name(value):
            return None  # memory changed behind autograd's back: it does not take the value for a view of this one
        with compat.no_recording():  # sizes may be computed from numbers that change
            same = _facts(made, new_leaf(value)) == _facts(value)
        if not same:
            return None
        if custom:
            return path
        creation = compat.creation_of(value)  # a custom function with autograd off leaves no other trace
        if path.regenerates_grad_fn == "asked" and creation not in (None, compat.PLAIN_VIEW):
            reason = "one of several views leaves the step, of a view that autograd has made anew before"
            self.world.heap.refuse("SFX107", reason)
        return path if creation == compat.creation_of(made) else replace(path, creation=creation)

    def _plain_history(self, value: torch.Tensor, base: torch.Tensor | fx.Node) -> bool:
        """True if autograd knows the value by view operations alone: no custom function, no hook in between."""
        stop = base.grad_fn if safe_isinstance(base, torch.Tensor) else None
        todo, seen = [value.grad_fn], set()
        while todo:
            fn = todo.pop()
            if fn is None or fn is stop or fn in seen:
                continue
            seen.add(fn)
            if safe_isinstance(fn, torch.autograd.function.BackwardCFunction) or fn in self.world.hooked:
                return False
            todo += [following for following, _ in fn.next_functions]
        return True


def _kind(t: torch.Tensor) -> tuple[Any, ...]:
    return t.dtype, t.is_conj(), t.is_neg()


def _name(t: torch.Tensor) -> str:
    return "" if t.grad_fn is None else t.grad_fn.name()


def _facts(t: torch.Tensor, begins: bool = False) -> tuple[Any, ...]:
    """What must come out as it was; eager's own operations choose the strides of dimensions of size 1, outside."""
    size, stride, offset = layout_of(t)
    stride = tuple(None if type(n) is int and n == 1 else step for n, step in zip(size, stride, strict=True))
    return (size, stride, offset, t.dtype, t.is_conj(), t.is_neg(), begins or t.requires_grad, t._is_view())


def _of_another_time(record: TensorRecord, value: torch.Tensor) -> bool:
    """True for a view of a tensor that required gradients when the view was made, and ceases to.

    Such tensors do so before their views are made outside (``Effect.switches``).
    """
    return bool(record.requires_grad and not record.shadow.requires_grad and value.requires_grad)


def new_leaf(t: torch.Tensor) -> bool:
    """True for a tensor that has no history and requires gradients: that was asked of it after it was made."""
    return t.requires_grad and t.grad_fn is None


def _repeats_elements(t: Any) -> bool:
    """True for a view with an element in several places, as ``expand`` and ``unfold`` make them."""
    if not safe_isinstance(t, torch.Tensor):
        return False
    dims = sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _view_op(node: fx.Node, item: Any, numbers: list[fx.Node]) -> ViewOp:
    viewed = parent_of(node)

    def named(value: fx.Node) -> Any:
        if value is viewed:
            return BASE
        if value not in numbers:
            numbers.append(value)
        return Number(numbers.index(value))

    grad = NO_GRAD not in node.meta
    if DATA in node.meta:
        return ViewOp(data_of, (BASE,), {}, grad=grad)
    args, kwargs = fx.map_arg(node.args, named), fx.map_arg(node.kwargs, named)
    named_args = {k: _plain(a) for k, a in kwargs.items()}
    return ViewOp(
        node.meta.get(CALLED, node.target),
        tuple(_plain(a) for a in args),
        named_args,
        item,
        changes_layout(node),
        grad,
    )


def _plain(value: Any) -> Any:
    """Lists of a graph are immutable ones of its own."""
    return [_plain(item) for item in value] if safe_isinstance(value, (list, tuple)) else value
