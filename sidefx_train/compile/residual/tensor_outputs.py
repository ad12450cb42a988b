"""Tensors that leave a step: results of the graph, and views replayed on them with eager's operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.capture.side_effects.effect import Effect
from sidefx_train.compile.capture.world.native_call_facts import first_line
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.artifacts import OWN
from sidefx_train.compile.graph.freed_history import is_freed
from sidefx_train.compile.graph.step_metadata import OutputFacts, OutputKind, StepMetadata, dynamic_dims
from sidefx_train.compile.graph.view_chains import (
    first_operation,
    gradient_edge,
    gradient_edges_behind,
    own_counter,
)
from sidefx_train.compile.residual.autograd_nodes import freed, pass_through, whole_view
from sidefx_train.compile.residual.input_metadata import input_facts
from sidefx_train.compile.residual.saved_tensor_refs import Seen
from sidefx_train.compile.residual.storage_updates import as_inference, grow
from sidefx_train.compile.residual.view_outputs import Views, new_leaf
from sidefx_train.compile.residual.view_replay import CustomView, IntermediateView, KnownOutputs, ViewChain, replay

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


class TensorRebuilder(ABC):
    """Generates expressions for tensors of the trace.

    Attributes:
        outputs: graph nodes whose values the code needs: ``o[0]``, ``o[1]``...
        index: the position of each of them.
        differentiable: differentiable outputs, by position.
        updates: those that are new values of inputs -> the inputs' positions.
        customs: those that are views of inputs made by custom functions.
        returned: nodes that the graph returns, by storage.
        lines: statements that must run before the expressions are used.
        live: views that the backward passes through; ``o[-1]`` is the first of them.
        asked: how often the step itself returns a tensor, by ``id``.
        seen: records the views that the code makes, if a backward leaves the step too.
        shown: those views, by their nodes.
    """

    def __init__(self, world: TraceWorld, writer: Writer, known_outputs: KnownOutputs) -> None:
        self.world = world
        self.writer = writer
        self.known_outputs = known_outputs
        self.views = Views(world, known_outputs)
        self.live: list[IntermediateView] = []
        self.returned: dict[int, set[fx.Node]] = {}
        self.outputs: list[fx.Node] = []
        self.lines: list[str] = []
        self.differentiable: dict[int, torch.Tensor] = {}
        self.updates: dict[int, int] = {}
        self.customs: dict[int, CustomView] = {}
        self._replayed: list[tuple[fx.Node, torch.Tensor]] = []
        self._metadata_mutated: list[tuple[torch.Tensor, int]] = []
        self._begun: dict[int, int] = {}
        self._followed: dict[int, int] = {}
        self.index: dict[fx.Node, int] = {}
        self._positions: dict[str, int] = {}
        self._given: list[TensorRecord] = []
        self._left: list[tuple[torch.Tensor, fx.Node, ViewChain | None]] = []
        self._entry_aliases: dict[int, tuple[str, TensorRecord]] = {}
        self.asked: Counter[int] = Counter()
        self.seen = Seen()
        self.shown: dict[fx.Node, int] = {}

    @abstractmethod
    def expression(self, value: Any) -> str:
        """Returns code for a value of the trace."""

    def output(self, node: fx.Node) -> str:
        """Returns code for the value of a graph node."""
        index = self.index.get(node)
        if index is None:
            index = self.index[node] = len(self.outputs)
            self.outputs.append(node)
            self._positions[f"o[{index}]"] = index
        return f"o[{index}]"

    def position(self, expression: str) -> int | None:
        """Returns the position of the output that an expression is; ``None`` for another expression."""
        return self._positions.get(expression)

    def histories(self) -> list[torch.Tensor]:
        """Returns the tensors with a history that leave the step, views and new values of inputs among them."""
        left = [*(value for value, _, _ in self._left), *(view.value for view in self.live)]
        values = {id(value): value for value in (*left, *self.differentiable.values()) if value.grad_fn is not None}
        return [value for value in values.values() if not is_freed(self.world.freed, value.grad_fn)]

    def settle(self) -> None:
        """Subtracts from the versions of bases what replaying their views will add."""
        self.world.replayed = self._metadata_mutated
        for base, count in self._metadata_mutated:
            counter = own_counter(self.world.tracer.node_of(base))
            for node in self.returned.get(compat.storage_id(base), ()):
                if OWN in node.meta and own_counter(node) is counter:
                    node.meta[OWN] -= count

    def prepared(self, value: torch.Tensor) -> str:
        """Returns code for a base of other tensors, which the step itself need not return."""
        self.asked[id(value)] -= 1
        return self.expression(value)

    def given(self, record: TensorRecord) -> None:
        """Records an outside tensor that leaves, or whose view leaves."""
        self._given.append(record)

    def metadata(self) -> StepMetadata:
        """Returns the metadata of the step's tensors, after all outputs were written."""
        inputs = {id(real): i for i, real in enumerate(self.world.tracer.real_inputs)}
        facts: list[OutputFacts] = []
        for record in dict.fromkeys(self._given):
            if self.asked[id(record.shadow)] > 0:
                needs = bool(record.shadow.requires_grad)
                dims = dynamic_dims(record.shadow)
                facts.append(OutputFacts("is_input", inputs[id(record.real)], dims, needs))
        own = {self.index[node]: value for value, node, chain in self._left if chain is None}
        hidden = {i for i, value in own.items() if self.asked[id(value)] <= 0}
        known: set[int] = set()
        for value, node, chain in self._left:
            kind, base = self._made_of(value, node, chain, inputs, hidden, known)
            if self.asked[id(value)] > 0:
                facts.append(OutputFacts(kind, base, dynamic_dims(value), bool(value.requires_grad)))
        bases = sorted(hidden | (known - own.keys()))
        return StepMetadata(input_facts(self.world), tuple(facts), tuple(bases), tuple(sorted(self.differentiable)))

    def _made_of(
        self,
        value: torch.Tensor,
        node: fx.Node,
        chain: ViewChain | None,
        inputs: dict[int, int],
        hidden: set[int],
        known: set[int],
    ) -> tuple[OutputKind, int]:
        """Returns kind and base of an output; ``known`` contains the bases seen so far."""
        if chain is None:
            return "custom_function_view" if self._is_custom_view(value) else "non_alias", self.index[node]
        record = None if safe_isinstance(chain.base, fx.Node) else self.world.heap.memory.record_of(chain.base)
        if record is not None:
            return "unsafe_view_alias" if chain.unsafe else "alias_of_input", inputs[id(record.real)]
        made_by = chain.base if safe_isinstance(chain.base, fx.Node) else self.world.tracer.node_of(chain.base)
        if made_by not in self.index:  # a view of another view
            deeper = next(each for value, _, each in self._left if value is chain.base)
            return self._made_of(value, node, deeper, inputs, hidden, known)
        base = self.index[made_by]
        first = base not in known
        known.add(base)
        if chain.unsafe:
            return "unsafe_view_alias", base
        if base not in hidden and not safe_isinstance(chain.base, fx.Node):
            return "alias_of_intermediate_base_is_user_output", base
        return "alias_of_intermediate_save_as_output" if first else "alias_of_intermediate", base

    def tensor(self, value: torch.Tensor) -> str:
        """Returns code for a tensor that the step created."""
        tracer = self.world.tracer
        if not tracer.has_node(value):
            self.world.heap.refuse("SFX111", "an output is a tensor that no recorded operation made")
        node = tracer.node_of(value)
        kept_inside = self.world.private_memory.get(compat.storage_id(value))
        if kept_inside is not None:
            kept_inside()
        try:
            value.grad_fn  # noqa: B018
        except (RuntimeError, ValueError, IndexError) as error:  # autograd forbids reading some multi-output
            # views, and replays others on a base whose metadata was mutated since
            self.world.heap.refuse("SFX107", f"an output cannot be read after the step: {first_line(error)}")
        if value._is_view() and compat.is_jagged(value._base):
            return self._of_jagged(value, node)
        native = self.world.custom_functions.of(value)
        if native is not None and native.returned_input(value) is not None:  # its node makes the alias
            self._left.append((value, node, None))
            self.differentiable[self.outputs.index(node) if node in self.index else len(self.outputs)] = value
            return self.output(node)
        chain = self.views.chain(value, node)
        self._left.append((value, node, chain))
        if chain is not None:
            if chain.grad:
                self._replayed.append((node, value))
                self._begun[id(value)] = first_operation(value, chain.base)
            if self.known_outputs.staged and chain.grad:
                return self._intermediate_view(value, chain)
            return self._view(chain, node) + (".requires_grad_()" if new_leaf(value) else "")
        outside = self.views.chain(value, node, custom=True) if self._is_custom_view(value) else None
        if outside is not None and self.views.is_outside(value):
            return self._custom_view(value, node, outside)
        unrelated = (
            value.grad_fn is not None and not value._is_view() and own_counter(node) is node and not value._version
        )
        if self.views.is_outside(value) and not unrelated:
            self.world.heap.refuse("SFX111", "an output aliases an outside tensor in a way that cannot be replayed")
        custom = self._is_custom_view(value)
        if value._is_view() and value.requires_grad and not is_freed(self.world.freed, value.grad_fn) and not custom:
            self.world.heap.refuse("SFX107", "an output is a differentiable view that cannot be replayed")
        self.returned.setdefault(compat.storage_id(value), set()).add(node)
        if value.is_inference() and not torch.is_inference_mode_enabled():
            if compat.storage_id(value) in self.known_outputs.shared or value.is_conj() or value.is_neg():
                self.world.heap.refuse("SFX111", "outputs made in inference mode share storage")
            return f"{self.writer.constant(as_inference)}({self.output(node)})"
        if not value._is_view() and not value.is_inference():
            node.meta[OWN] = value._version
        if value.grad_fn is not None and not is_freed(self.world.freed, value.grad_fn):
            expression = self.output(node)
            if self.differentiable.setdefault(self.index[node], value) is not value:
                self.world.heap.refuse("SFX107", "cannot return one value with two autograd histories")
            function = pass_through(type(value.grad_fn).__name__, whole_view) if custom else None
            return expression if function is None else f"{self.writer.constant(function)}({expression})"
        return self.with_autograd(value, self.output(node))

    def _of_jagged(self, value: torch.Tensor, node: fx.Node) -> str:
        """Returns code for a view of the values of a jagged tensor: made from that tensor again, as eager made it."""
        chain = self.views.of_jagged(value, node)
        parts = [
            self.expression(chain.base),
            self.writer.constant(chain.ops, "views"),
            self.writer.constant(chain.grad),
        ]
        if chain.numbers:
            parts.append("(" + "".join(f"{self.output(number)}, " for number in chain.numbers) + ")")
        return f"{self.writer.constant(replay)}({', '.join(parts)})"

    def _custom_view(self, value: torch.Tensor, node: fx.Node, chain: ViewChain) -> str:
        """Returns code for a view of an outside tensor by a custom autograd function, whose backward is in the
        graph."""
        record = None if safe_isinstance(chain.base, fx.Node) else self.world.heap.memory.record_of(chain.base)
        if record is None or record.entry_storage is not None:
            self.world.heap.refuse("SFX111", "an output is a view by a custom function whose base is not an input")
        expression = self.output(node)
        if self.differentiable.setdefault(self.index[node], value) is not value:
            self.world.heap.refuse("SFX107", "cannot return one value with two autograd histories")
        for number in chain.numbers:
            self.output(number)
        numbers = tuple(self.index[number] for number in chain.numbers)
        name = type(value.grad_fn).__name__
        self.customs[self.index[node]] = CustomView(name, self._place_of(record), chain, numbers)
        return expression

    def _is_custom_view(self, value: torch.Tensor) -> bool:
        """Returns True for a view by a custom autograd function whose storage no other output shares."""
        if not value._is_view() or compat.storage_id(value) in self.known_outputs.shared or value._version:
            return False
        return safe_isinstance(value.grad_fn, torch.autograd.function.BackwardCFunction)

    def replace_storages(self, changes: list[Effect]) -> None:
        """Replaces the storages of outside tensors, all at once, before anything else is computed from them.

        Enlarged ones come first: another tensor may get one of them.
        """
        enlarged = [
            f"{self.writer.constant(grow)}({self.writer.value(change.target)}, {self.prepared(change.value)})"
            for change in changes
            if change.kind == "grow"
        ]
        self.lines += enlarged
        replaced = [
            f"{self.writer.value(change.target)}.data = {self.prepared(change.value)}"
            for change in changes
            if change.kind == "set_data"
        ]
        self.lines += replaced

    def entry_aliases(self) -> list[str]:
        """Returns code for aliases of outside tensors in their entry storage, from which outputs are made."""
        return [
            f"{name} = {self.writer.value(record.source)}.detach()" for name, record in self._entry_aliases.values()
        ]

    def entry_alias(self, record: TensorRecord) -> str:
        """Returns the name of such an alias."""
        self.given(record)
        name, _ = self._entry_aliases.setdefault(id(record), (f"entry_alias{len(self._entry_aliases)}", record))
        return name

    def update(self, record: TensorRecord) -> None:
        """Makes the new differentiable value of an input a result of the captured part."""
        node = self.world.tracer.node_of(record.shadow)
        self.output(node)
        self.differentiable[self.index[node]] = record.shadow
        self.updates[self.index[node]] = self._position(record)

    def begins(self, record: TensorRecord) -> tuple[int, int]:
        """Returns the position of a view with history from its base among the step's views, in forward order."""
        base = self.world.heap.by_real[id(record.real._base)]
        history = record.shadow.grad_fn
        return first_operation(record.shadow, base.shadow), -1 if history is None else history._sequence_nr()

    def follow(self, record: TensorRecord) -> None:
        """Makes an outside view, whose base was written, a view that the backward passes through."""
        if record.edge is None and record.shadow.shape != record.real.shape:
            reason = f"{record.source.label} has its metadata mutated, and its base gets an autograd history"
            self.world.heap.refuse("SFX107", reason)
        base = self._place_of(self.world.heap.by_real[id(record.real._base)])  # type: ignore[arg-type]
        self._followed[id(record)] = len(self.live)
        self.live.append(IntermediateView(record.shadow, base, None, position=self._position(record)))

    def _position(self, record: TensorRecord) -> int:
        return next(i for i, real in enumerate(self.world.tracer.real_inputs) if real is record.real)

    def _place_of(self, record: TensorRecord) -> tuple[Literal["input", "result", "view"], int]:
        """Returns the location of an outside tensor after everything was written."""
        if id(record) in self._followed:
            return "view", self._followed[id(record)]
        position = self._position(record)
        new_value = next((i for i, updated in self.updates.items() if updated == position), None)
        return ("input", position) if new_value is None else ("result", new_value)

    def found_outputs(self) -> KnownOutputs:
        """Returns what is known of all outputs, after everything was written."""
        sharing = {storage for storage, nodes in self.returned.items() if len(nodes) > 1}
        edges = {gradient_edge(value): (node, value) for node, value in self._replayed}
        known_outputs = [*self.differentiable.values(), *(value for _, value in self._replayed)]
        behind = [gradient_edges_behind(value) for value in known_outputs]
        passed = dict(edges[edge] for found in behind for edge in found if edge in edges)
        for node, view in self.views.between.items():  # created once if several views share it
            if sum(gradient_edge(view) in found for found in behind) > 1:
                passed[node] = view
        self.views.check_counters()
        before = self.known_outputs
        staged = before.staged or bool(self.differentiable)
        counters = {**before.counters, **self.views.counters}
        views = {
            id(view): view for view in (*(view for _, view in before.replayed), *(view for _, view in self._replayed))
        }
        replayed = tuple(((self._begun[id(view)], view.grad_fn._sequence_nr()), view) for view in views.values())
        return KnownOutputs(before.shared | sharing, {**before.passed, **passed}, replayed, counters, staged)

    def _base(self, chain: ViewChain) -> str:
        if safe_isinstance(chain.base, fx.Node):
            self.returned.setdefault(compat.storage_id(chain.base.meta["val"]), set()).add(chain.base)
            return self.output(chain.base)
        mutates_metadata = sum(op.mutates_metadata for op in chain.ops if chain.grad and not chain.regenerates_grad_fn)
        if mutates_metadata:
            self._metadata_mutated.append((chain.base, mutates_metadata))
        return self.prepared(chain.base)

    def _intermediate_view(self, value: torch.Tensor, chain: ViewChain) -> str:
        """Returns code for a view made right after its base, so that later autograd nodes can build on it."""
        self._base(chain)
        base = chain.base
        place: tuple[Literal["input", "result", "view"], int]
        earlier = next((i for i, view in enumerate(self.live) if view.value is base), None)
        if earlier is not None:
            place = ("view", earlier)
        elif safe_isinstance(base, torch.Tensor) and (record := self.world.heap.memory.record_of(base)) is not None:
            if record.entry_storage is not None:
                reason = f"an output is a view of {record.source.label}, whose storage was replaced (.data)"
                self.world.heap.refuse("SFX107", reason)
            place = self._place_of(record)
        else:
            made_by = base if safe_isinstance(base, fx.Node) else self.world.tracer.node_of(base)
            if made_by not in self.index:  # a view that the step made a leaf (requires_grad_)
                reason = "the backward of an output reaches a leaf created in the step (requires_grad_)"
                self.world.heap.refuse("SFX107", reason)
            place = ("result", self.index[made_by])
        for node in chain.numbers:
            self.output(node)
        self.live.append(IntermediateView(value, place, chain, tuple(self.index[node] for node in chain.numbers)))
        return f"o[{-len(self.live)}]"

    def _view(self, chain: ViewChain, node: fx.Node) -> str:
        """Returns code that makes a view from its base like eager."""
        parts = [self._base(chain), self.writer.constant(chain.ops, "views"), self.writer.constant(chain.grad)]
        if chain.numbers:
            parts.append("(" + "".join(f"{self.output(node)}, " for node in chain.numbers) + ")")
        if chain.version is not None:
            parts.append(f"version={chain.version}")
        if chain.unrelated:
            parts.append("unrelated=True")
        if chain.creation is not None:
            parts.append(f"creation={self.writer.constant(chain.creation)}")
        if chain.regenerates_grad_fn:
            parts.append(f"regenerates_grad_fn={self.writer.constant(chain.regenerates_grad_fn)}")
        made = f"{self.writer.constant(replay)}({', '.join(parts)})"
        if not self.known_outputs.staged:
            return made
        number = self.shown.setdefault(node, len(self.shown))
        return f"{self.writer.constant(self.seen.made, 'seen')}({number}, {made})"

    def with_autograd(self, value: torch.Tensor, expression: str) -> str:
        """Adds the autograd state of ``value`` to a result."""
        if not value.requires_grad:
            return expression
        if value.grad_fn is None:
            return f"{expression}.requires_grad_()"
        if not is_freed(self.world.freed, value.grad_fn):
            reason = "an output is an earlier value of a tensor whose backward graph is still needed"
            self.world.heap.refuse("SFX107", reason)
        name = type(value.grad_fn).__name__
        return f"{self.writer.constant(freed)}({expression}, {self.writer.constant(name)})"

    def with_gradient(self, value: torch.Tensor, expression: str) -> str:
        """Sets the gradient from the step's backward, or ``retain_grad`` for a later one."""
        if value.retains_grad:
            self.lines.append(f"{expression}.retain_grad()")
        if (value.retains_grad or value.is_leaf) and value.grad is not None:
            self.lines.append(f"{expression}.grad = {self.expression(value.grad)}")
        return expression
