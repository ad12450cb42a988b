"""Outputs that alias an input or each other: view chains, replayed from their base with eager's own view operations.

The graph returns only bases. A view is replayed outside, on the real base, so that everything later in-place changes
depend on (``_base``, version counter, ``grad_fn``, error messages) is as in eager.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

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
from sidefx_train.compile.residual.view_replay import (
    BASE,
    KnownOutputs,
    Number,
    ViewChain,
    ViewOp,
    data_of,
    replay,
    seen_as,
)

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


class Views:
    """Finds the bases of outputs.

    Args:
        world: the capture.
        known_outputs: what is known of all outputs.
    """

    def __init__(self, world: TraceWorld, known_outputs: KnownOutputs) -> None:
        self.world = world
        self.shared = known_outputs.shared
        self.passed = {**known_outputs.counters, **known_outputs.passed}
        self.counters: dict[fx.Node, torch.Tensor] = {}
        self.between: dict[fx.Node, torch.Tensor] = {}
        self._counted: dict[fx.Node, set[fx.Node]] = {}
        records = [r for r in world.heap.by_real.values() if safe_isinstance(r, TensorRecord)]
        placeholder = {
            id(real): node for real, node in zip(world.tracer.real_inputs, world.tracer.placeholders, strict=True)
        }
        self._records = {placeholder[id(r.real)]: r for r in records}
        self._outside = {compat.storage_id(r.memory) for r in records}

    def chain(self, value: torch.Tensor, node: fx.Node, custom: bool = False) -> ViewChain | None:
        """Returns the view chain of ``value``, or ``None`` if the graph must return it itself.

        Args:
            value: the output.
            node: its node.
            custom: a custom autograd function made it a view: its history is not replayed.
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
        if not safe_isinstance(base, fx.Node):  # a replayed operation made one that shares its counter
            unrelated = own and not any(DATA in n.meta for n in below)
        if any(n.meta.get(NO_GRAD) == "inference" for n in below):
            self.world.heap.refuse("SFX111", "an output is a view made in inference mode")
        if any(NO_GRAD in n.meta for n in below) and any(map(changes_layout, below)):
            self.world.heap.refuse("SFX107", "an output is a view, made with autograd off, whose metadata was mutated")
        if any(NO_GRAD in n.meta for n in below) and self._written_elsewhere(base):
            self.world.heap.refuse("SFX107", "an output is a view made with autograd off whose storage was written")
        grad = not custom and value.grad_fn is not None
        if grad and any(_repeats_elements(n.meta["val"]) for n in below) and written_since(node):
            reason = "an output is a view with overlapping elements whose base was written after it was made"
            self.world.heap.refuse("SFX111", reason)  # autograd would treat it as another kind of view then
        if grad:
            self.between |= {n: kept for n in below[1:] if (kept := self._kept(n)) is not None}
        unsafe = any(CALLED in n.meta for n in below)
        version = value._version if own else None
        regenerates_grad_fn = (
            self._regenerated(value, node, base, below) if grad and safe_isinstance(base, torch.Tensor) else ""
        )
        chain = ViewChain(
            base,
            tuple(ops),
            tuple(numbers),
            grad,
            version,
            unrelated,
            unsafe=unsafe,
            regenerates_grad_fn=regenerates_grad_fn,
        )
        return self._held(chain, value, custom)

    def of_jagged(self, value: torch.Tensor, node: fx.Node) -> ViewChain:
        """Returns the chain of operations from a jagged tensor to a view of its values.

        Raises:
            Unsupported: the view cannot be replayed.
        """
        base: Any = value._base
        tracer = self.world.tracer
        inner = first_of(tracer.node_of(base._values)) if tracer.has_node(base._values) else None
        way = way_up(node)
        place = way.index(inner) if inner in way else 0
        below = way[:place]
        taken = below.pop() if below else None  # from the jagged tensor
        odd = any(NO_GRAD in each.meta or changes_layout(each) or CALLED in each.meta for each in way[:place])
        if taken is None or taken.target is not torch.ops.aten.detach.default or odd or value.is_inference():
            self._refuse_view_of_jagged()
        if value.requires_grad and not base.requires_grad:
            self._refuse_view_of_jagged()
        numbers: list[fx.Node] = []
        ops = [ViewOp(compat.VALUES_OF_JAGGED, (BASE,), {})]
        for each in reversed(below):
            if each.target is not operator.getitem:
                item = next((n.args[1] for n in below if n.target is operator.getitem and n.args[0] is each), None)
                ops.append(_view_op(each, item, numbers))
        return ViewChain(base, tuple(ops), tuple(numbers), value.grad_fn is not None)

    def _refuse_view_of_jagged(self) -> NoReturn:
        self.world.heap.refuse("SFX107", "an output is a view of a nested tensor that cannot be replayed")

    def _regenerated(
        self, value: torch.Tensor, node: fx.Node, base: torch.Tensor, below: list[fx.Node]
    ) -> Literal["", "unasked", "asked"]:
        """Returns whether autograd has regenerated the history of a view or of its base (``"asked"``), or will do
        so."""
        if not counted_since(below[-1]):
            return ""
        late = base._is_view() and gradient_edge(base) not in gradient_edges_behind(value)
        if any(each.target in STRIDED for each in below):  # its derivative depends on what it was made from
            mutates_metadata = frozenset(filter(changes_layout, below))
            made = next(each for each in below if is_replayed(each))
            if not counted_since(made):
                if late or counted_since(below[-1], besides=mutates_metadata):
                    reason = "an output is an as_strided view whose history autograd has regenerated"
                    self.world.heap.refuse("SFX107", reason)
                return ""
        elif self._before_mutation is None and not late:
            return ""
        return "asked" if self._is_asked(node) else "unasked"

    def _is_asked(self, node: fx.Node) -> bool:
        """Returns True if the step reads the history of a view after the last write to its storage, or writes to it
        last."""
        last = last_counted(node)
        return last is node or any(user > last for user in node.users)

    def _kept(self, node: fx.Node) -> torch.Tensor | None:
        """Returns the view that a node made or wrote last, if it is unchanged."""
        kept = self.world.tracer.views.get(first_of(node))
        if kept is None or self.world.tracer.node_of(kept) is not node:
            return None
        try:
            if not kept._is_view() or kept.grad_fn is None:
                return None
        except RuntimeError:  # autograd forbids reading some multi-output views: they are no bases
            return None
        return kept if same_layout(node.meta.get("val"), kept) else None

    def _note_counter(self, value: torch.Tensor, below: list[fx.Node]) -> None:
        """Records that a value shares the version counter of a ``.data``: if that leaves too, it becomes the value's
        base.

        ``unsafe_split`` creates separate counters too.
        """
        data = next((each for each in below if counts_alone(each)), None)
        if data is None:
            return
        if data is below[0]:
            self.counters[data] = value
        else:
            self._counted.setdefault(data, set()).add(below[0])

    def check_counters(self) -> None:
        """Refuses several outputs that share a version counter of no other output."""
        if any(len(values) > 1 and data not in self.counters for data, values in self._counted.items()):
            self.world.heap.refuse("SFX111", "several outputs are views of a tensor's .data, which is not an output")

    def counted(self) -> frozenset[fx.Node]:
        """Returns the nodes that gave outputs a version counter of their own."""
        return frozenset((*self.counters, *self._counted))

    def is_outside(self, value: torch.Tensor) -> bool:
        """Returns True for a value in the storage of an input, not of a graph result."""
        if value.is_inference():
            return False
        return compat.storage_id(value) in self._outside

    def _base(self, value: torch.Tensor, up: list[fx.Node]) -> tuple[Any, list[fx.Node]]:
        """Returns the base of ``value``, and the nodes from ``value`` up to it."""
        record = self._records.get(up[-1])
        base = value._base if value._is_view() else None
        tracer = self.world.tracer
        moved = None if base is None else self.world.heap.record_of(base)
        if not value._is_view():  # possibly detached from it
            moved = self._counted_with(value, up)
        moved = self._enlarged(value) or moved
        if safe_isinstance(moved, TensorRecord) and moved.entry_storage is not None:
            if _of_another_time(moved, value):
                reason = f"an output is a view of {moved.source.label}, which no longer requires gradients"
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
        """Returns the nodes of a view made from an outside tensor before its metadata mutation (``t_``)."""
        place = len(up) - 1
        while place > 0 and is_in_place(up[place - 1]):
            place -= 1
        was, now = up[place].meta.get("val"), record.shadow
        if (
            place == 0
            or record.entry_storage is not None
            or not safe_isinstance(was, torch.Tensor)
            or was.dtype != now.dtype
        ):
            return []
        if value.grad_fn is not None and _kind(value) != _kind(now):  # autograd regenerates it differently
            return []
        size, stride, offset = layout_of(was)
        distance = offset - now.storage_offset()
        if not all(safe_isinstance(n, int) for n in (*size, *stride, distance)):
            return []
        self._before_mutation = ViewOp(seen_as, (BASE, size, stride, distance), {})
        return up[:place]

    def _counted_with(self, value: torch.Tensor, up: list[fx.Node]) -> TensorRecord | None:
        """Returns the outside tensor with replaced storage whose version counter ``value`` has."""
        for record in self.world.heap.memory.replaced():
            if compat.share_version_counter(value, record.shadow):
                in_entry_storage = (
                    up[-1] is self.world.tracer.node_of(record.entry_storage) or self._records.get(up[-1]) is record
                )
                return (
                    None
                    if in_entry_storage and first_of(self.world.tracer.node_of(record.shadow)) not in up
                    else record
                )
        return None

    def _enlarged(self, value: torch.Tensor) -> TensorRecord | None:
        """Returns the outside tensor in whose resized storage ``value`` is: its own storage, not a graph result."""
        known = [
            record for record in self.world.heap.memory.replaced() if record.resized and record.new_storage is not value
        ]
        return next((record for record in known if compat.storage_id(record.shadow) == compat.storage_id(value)), None)

    def _below_moved(self, record: TensorRecord, up: list[fx.Node]) -> list[fx.Node]:
        """Returns the nodes of a view after its outside base, in the base's new storage."""
        shadow = record.shadow
        below = below_base(up, first_of(self.world.tracer.node_of(shadow)), shadow)
        if not below and record.returned:
            below = below_base(up, up[-1], shadow)
        if not below:
            reason = f"an output is a view of {record.source.label}, whose storage was replaced since (.data)"
            self.world.heap.refuse("SFX111", reason)
        return below

    def _refuse_metadata_mutated_base(self, value: torch.Tensor) -> None:
        """Refuses a view from before a metadata mutation of its base: if the base leaves too, it cannot be replayed."""
        if value.requires_grad or compat.storage_id(value) in self.shared | self._outside:
            reason = "an output is a view whose base's metadata was mutated after it was made"
            self.world.heap.refuse("SFX111", reason)

    def _written_elsewhere(self, base: torch.Tensor | fx.Node) -> bool:
        """Returns True if an input was written that shares storage with ``base`` unknown to their fake tensors."""
        if safe_isinstance(base, fx.Node) or not base.requires_grad:
            return False
        records = [r for r in self._records.values() if compat.storage_id(r.memory) == compat.storage_id(base)]
        return any(r.version != r.entry_version and not compat.share_version_counter(r.shadow, base) for r in records)

    def _made(self, base: torch.Tensor, up: list[fx.Node]) -> bool:
        """Returns True for a base that the step created itself."""
        return self.world.heap.record_of(base) is None and first_of(self.world.tracer.node_of(base)) in up

    def _held(self, chain: ViewChain, value: torch.Tensor, custom: bool) -> ViewChain | None:
        """Returns the chain if replaying it on the fake base gives the captured value."""
        if chain.grad and not self._plain_history(value, chain.base):
            return None
        numbers = tuple(node.meta["val"] for node in chain.numbers)
        # The replay mutates the metadata of a base that only views refer to; the graph's metadata must stay.
        base = compat.fake_snapshot(chain.base.meta["val"]) if safe_isinstance(chain.base, fx.Node) else chain.base
        version = base._version
        try:
            with compat.no_recording():
                made = replay(
                    base,
                    chain.ops,
                    chain.grad,
                    numbers,
                    chain.version,
                    chain.unrelated,
                    regenerates_grad_fn=chain.regenerates_grad_fn,
                )
        except (RuntimeError, IndexError, ValueError):  # its base has been resized since
            return None
        finally:
            compat.set_version(base, version)
        if (
            not chain.grad and not custom and made.grad_fn is not None
        ):  # the base began to require gradients after it was viewed
            return None
        if chain.grad and not chain.regenerates_grad_fn and base is not value._base and _name(made) != _name(value):
            return None  # written without autograd, which does not treat the value as a view of this base
        with compat.no_recording():  # sizes may be computed from symbolic numbers
            same = _agree(_facts(made, new_leaf(value)), _facts(value))
        if not same:
            return None
        if custom:
            return chain
        creation = compat.creation_of(value)  # the only trace of a custom function with autograd off
        if chain.regenerates_grad_fn == "asked" and creation not in (None, compat.PLAIN_VIEW):
            reason = "an output is one of several views of a view whose history autograd has regenerated"
            self.world.heap.refuse("SFX107", reason)
        return chain if creation == compat.creation_of(made) else replace(chain, creation=creation)

    def _plain_history(self, value: torch.Tensor, base: torch.Tensor | fx.Node) -> bool:
        """Returns True if the history consists of view operations: no custom function, no hook in between."""
        stop = base.grad_fn if safe_isinstance(base, torch.Tensor) else None
        todo, seen = [value.grad_fn], set()
        while todo:
            fn = todo.pop()
            if fn is None or fn is stop or fn in seen:
                continue
            seen.add(fn)
            hooked = fn in self.world.hooked and not self.world.specialization.native_backward
            custom = safe_isinstance(fn, torch.autograd.function.BackwardCFunction)
            if hooked or custom:  # it may be one if these run natively
                self.world.native_backward_wanted = True
                return False
            todo += [following for following, _ in fn.next_functions]
        return True


def _kind(t: torch.Tensor) -> tuple[Any, ...]:
    return t.dtype, t.is_conj(), t.is_neg()


def _name(t: torch.Tensor) -> str:
    return "" if t.grad_fn is None else t.grad_fn.name()


def _agree(made: Any, known: Any) -> bool:
    """Returns True for equal facts; numbers that only the graph knows follow from the same operations."""
    if safe_isinstance(made, tuple) and safe_isinstance(known, tuple):
        return len(made) == len(known) and all(map(_agree, made, known))
    unknown = [type(each) in compat.SYMBOLS and compat.is_unbacked(each) for each in (made, known)]
    return all(unknown) if any(unknown) else bool(made == known)


def _facts(t: torch.Tensor, begins: bool = False) -> tuple[Any, ...]:
    """Returns the metadata to compare; eager's own operations choose the strides of dimensions of size 1, outside."""
    size, stride, offset = layout_of(t)
    stride = tuple(None if _is_one(n) else step for n, step in zip(size, stride, strict=True))
    return (size, stride, offset, t.dtype, t.is_conj(), t.is_neg(), begins or t.requires_grad, t._is_view())


def _is_one(size: Any) -> bool:
    """Returns True for 1, and for a symbolic size of which that is known."""
    return bool(size == 1) if type(size) is int else size.node.maybe_as_int() == 1


def _of_another_time(record: TensorRecord, value: torch.Tensor) -> bool:
    """Returns True for a view of a tensor that required gradients when the view was made, and ceases to.

    Outside, such tensors cease before their views are made (``Effect.switches``).
    """
    return bool(record.requires_grad and not record.shadow.requires_grad and value.requires_grad)


def new_leaf(t: torch.Tensor) -> bool:
    """Returns True for a tensor without history that requires gradients: it was set after the tensor was created."""
    return t.requires_grad and t.grad_fn is None


def _repeats_elements(t: Any) -> bool:
    """Returns True for a view with overlapping elements, as from ``expand`` and ``unfold``, or if its sizes depend on
    data."""
    if not safe_isinstance(t, torch.Tensor):
        return False
    if any(safe_isinstance(each, torch.SymInt) and compat.is_unbacked(each) for each in (*t.shape, *t.stride())):
        return True
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
    """Converts FX's immutable lists."""
    return [_plain(item) for item in value] if safe_isinstance(value, (list, tuple)) else value
