"""Retraces a captured graph under functionalization, which records a graph without in-place operations.

Inputs are fake tensors with the entry metadata. The final value of a changed input becomes a trailing ``copy_``, or a
result that the runner copies. Number arguments become 0-dim tensors (``tensor_scalars``) or stay symbolic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.functionalization import memory_format as layouts
from sidefx_train.compile.functionalization.error_hazards import FACTORIZED, IndexUse
from sidefx_train.compile.functionalization.number_inputs import NumberInputs
from sidefx_train.compile.functionalization.retrace.operator_calls import OperatorCalls
from sidefx_train.compile.functionalization.retrace.options import RetraceOptions
from sidefx_train.compile.functionalization.scalar_placement import ScalarPlan, is_scalar_node
from sidefx_train.compile.functionalization.synthetic_bases import members, place_in, view_of
from sidefx_train.compile.functionalization.tensor_scalar_ops import TensorScalar
from sidefx_train.compile.graph.artifacts import SyntheticBase, TracedGraph, is_scalar
from sidefx_train.compile.graph.strided_layout import extent
from sidefx_train.compile.graph.view_chains import STRIDED, changes_layout
from sidefx_train.compile.ops.runtime_assert import RUNTIME_ASSERT
from sidefx_train.errors import BackendError

aten = torch.ops.aten
Layout = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass
class Retraced:
    """Result of a retrace.

    Attributes:
        feeds: source of each placeholder.
        packed: variables in the scalar buffer.
        bases: storages in which inputs overlap.
        module: the new graph; its outputs are the values of ``results``.
        results: output position of a traced node's value.
        final: output position of the new value of an input or base with a deferred mutation.
        mutated: input positions that the graph writes.
        metadata: input position -> new (size, stride, offset relative to the old one).
        layouts: (size, stride, offset) of the results.
        report: output position of the flag that an index was out of range, a matrix could not be factorized, or an
            assumed condition did not hold.
        mutated_bases: positions of the bases that the graph writes.
    """

    feeds: list[str]
    packed: list[str]
    bases: tuple[SyntheticBase, ...] = ()
    module: fx.GraphModule = field(init=False)
    results: dict[fx.Node, int] = field(default_factory=dict)
    final: dict[str, int] = field(default_factory=dict)
    mutated: list[int] = field(default_factory=list)
    metadata: dict[int, Layout] = field(default_factory=dict)
    layouts: dict[fx.Node, tuple[Any, Any, Any]] = field(default_factory=dict)
    report: int | None = None
    mutated_bases: list[int] = field(default_factory=list)


class Retracer:
    """State of one retrace."""

    def __init__(self, traced: TracedGraph, plan: ScalarPlan, options: RetraceOptions) -> None:
        self.traced = traced
        self.plan = plan
        self.options = options
        self.tracer = compat.new_proxy_tracer()
        self.env: dict[fx.Node, Any] = {}
        self.feeds: list[str] = []
        self.fakes: dict[fx.Node, torch.Tensor] = {}
        self.flags: list[torch.Tensor] = []
        self.members = members(options.bases, traced.inputs)
        self.base_fakes: list[torch.Tensor] = []
        self.base_values: list[Any] = []
        self.numbers = NumberInputs(traced, plan, options.skip, options.tensor_scalars)
        self.calls = OperatorCalls(options, self.numbers, self.tracer, self.flags)
        self.slots: list[TensorScalar] = []
        self.placeholders = [n for n in traced.module.graph.nodes if n.op == "placeholder"]
        self.member_of = {self.placeholders[position]: member for position, member in self.members.items()}
        self.metadata_mutated = {options.same[n]: n for n in traced.module.graph.nodes if changes_layout(n)}
        """Last operation that mutates a tensor's metadata in place, by tensor."""

    def run(self, wanted: Iterable[fx.Node]) -> Retraced:
        """Records the graph; ``wanted`` nodes become results."""
        fake_mode = self.traced.fake_mode
        entries = self._entry_fakes()
        packed = self.numbers.block()
        with compat.functionalizing(fake_mode, self.tracer, self.options.decompositions):
            with compat.below_functionalization():
                self._make_placeholders(entries, packed)
            for node in self.placeholders:
                if node in self.fakes:
                    self.env[node] = compat.to_functional(self.fakes[node])
            self.base_values = [compat.to_functional(fake) for fake in self.base_fakes]
            for position, member in self.members.items():
                self.env[self.placeholders[position]] = view_of(self.base_values[member.base], member)
            if packed is not None:
                block = compat.to_functional(packed)
                self.slots = [TensorScalar(block.select(0, i)) for i in range(len(self.numbers.packed))]
            for node in self.traced.module.graph.nodes:
                if node.op in ("call_function", "get_attr") and node not in self.options.skip:
                    self._step(node)
            return self._finish(wanted)

    # --- inputs

    def _entry_fakes(self) -> dict[fx.Node, Any]:
        entries: dict[fx.Node, Any] = {}
        numbers: dict[fx.Node, torch.SymInt] = {}
        with self.traced.fake_mode, torch.no_grad():
            for base in self.options.bases:
                device = self.traced.inputs[base.members[0]].example.device
                self.base_fakes.append(torch.empty(base.size, dtype=base.dtype, device=device))
            for i, (node, given) in enumerate(zip(self.placeholders, self.traced.inputs, strict=True)):
                if i in self.members:
                    continue
                used = any(user not in self.options.skip and user.op != "output" for user in node.users)
                if given.kind == "scalar":
                    if isinstance(given.example, torch.SymInt):
                        (entries if used else numbers)[node] = given.example
                elif used:
                    entries[node] = given.example.detach()
        unbound = compat.unbound_symbols([*entries.values(), *self.base_fakes])
        return entries | {node: value for node, value in numbers.items() if compat.symbol_of(value) in unbound}

    def _make_placeholders(self, entries: dict[fx.Node, Any], packed: torch.Tensor | None) -> None:
        for i, node in enumerate(self.placeholders):
            if node not in entries:
                continue
            self._placeholder(f"a{i}", entries[node])
            if isinstance(entries[node], torch.Tensor):
                self.fakes[node] = entries[node]
            else:
                self.env[node] = entries[node]
        for i, fake in enumerate(self.base_fakes):
            self._placeholder(f"b{i}", fake)
        if packed is not None:
            self._placeholder("packed", packed)
        else:
            named: dict[str, Any] = {}
            for node in self.numbers.nodes:
                name = self.plan.host.names[node]
                if node in self.env:
                    continue
                if name not in named:
                    self._placeholder(name, node.meta["val"])
                    named[name] = node.meta["val"]
                self.env[node] = named[name]

    def _placeholder(self, name: str, value: Any) -> None:
        proxy = self.tracer.create_proxy("placeholder", name, (), {})
        compat.track(value, proxy, self.tracer)
        self.feeds.append(name)

    # --- nodes

    def _step(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self.env[node] = self._constant(node)
            return
        if node in self.numbers.slot_of:
            self.env[node] = self.slots[self.numbers.slot_of[node]]
            return
        if node in self.env:
            return
        if is_scalar_node(node) and not self.numbers.needed_in_graph(node):
            if node.target is aten._local_scalar_dense.default and node in self.plan.late:
                # The current value: a later in-place operation does not change the number.
                self.env[node] = compat.from_functional(self._value(node.args[0]).clone())  # type: ignore[arg-type]
            return
        if node.target is RUNTIME_ASSERT:
            self._check_assumption(*node.args)  # type: ignore[arg-type]
            return
        if node.target is FACTORIZED:
            self.flags.append(self._value(node.args[0]).ne(0).any())  # type: ignore[arg-type]
            return
        given = self.options.same[node]
        if given in self.member_of and changes_layout(node):
            member, made = self.member_of[given], node.meta["val"]
            place = place_in(self.options.bases[member.base], made, self.traced.inputs, member.base)
            self.env[node] = view_of(self.base_values[member.base], place)
            return
        if node.target in STRIDED and given.op != "placeholder":
            self.env[node] = self._strided(node)
            return
        safe = {use.index: self._clamped(use) for use in self.options.guarded.get(node, ())}
        args = fx.map_arg(node.args, lambda n: safe[n] if n in safe else self._value(n))
        kwargs = fx.map_arg(node.kwargs, lambda n: safe[n] if n in safe else self._value(n))
        self.env[node] = self.calls.run(node, args, dict(kwargs))

    def _strided(self, node: fx.Node) -> torch.Tensor:
        """Runs ``as_strided``, which depends on the memory layout that values of a functional graph need not have."""
        viewed, made = node.args[0], node.meta["val"]
        (root,) = self.options.roots[node]
        for number, base in enumerate(self.options.bases):
            if any(self.options.roots[self.placeholders[m]] == frozenset((root,)) for m in base.members):
                return _with_bits(
                    view_of(self.base_values[number], place_in(base, made, self.traced.inputs, number)), made
                )
        if root in self.options.written:
            whole = self.env[root]
            was = root.meta["val"]
            if not (
                was.is_contiguous() and was.storage_offset() == 0 and compat.from_functional(whole).is_contiguous()
            ):
                raise BackendError("SFX201", f"{node.target} on a tensor that is written, and not contiguous: {root}")
            if was.dtype != made.dtype or was.numel() * was.itemsize < extent(made)[1]:
                raise BackendError("SFX201", f"{node.target} reaches past its base: {root}")
            return _with_bits(whole.as_strided(made.shape, made.stride(), made.storage_offset()), made)
        value = self._value(viewed)  # type: ignore[arg-type]
        if tuple(compat.from_functional(value).stride()) != tuple(viewed.meta["val"].stride()):  # type: ignore[union-attr]
            raise BackendError("SFX201", f"{node.target} on a tensor that gets another layout: {viewed}")
        return value.as_strided(made.shape, made.stride(), made.storage_offset())  # type: ignore[no-any-return]

    def _check_assumption(self, condition: fx.Node, holds: bool) -> None:
        value = self._value(condition).reshape(()).ne(0)
        self.flags.append(value.logical_not() if holds else value)

    def _clamped(self, use: IndexUse) -> torch.Tensor:
        """Clamps an index so that it cannot raise, and reports whether it was out of range."""
        index = self._value(use.index)
        bad = (index < use.low) | (index >= use.high)
        clamped = index.clamp(use.low, use.high - 1)
        if use.ignore is not None:
            ignore = self._value(use.ignore) if isinstance(use.ignore, fx.Node) else use.ignore
            ignore = ignore.value if isinstance(ignore, TensorScalar) else ignore
            bad = bad & (index != ignore)
            clamped = torch.where(index == ignore, index, clamped)
        self.flags.append(bad.any())
        return clamped

    def _value(self, node: fx.Node) -> Any:
        if node in self.env:
            return self.env[node]
        if node in self.numbers.slot_of:
            return self.slots[self.numbers.slot_of[node]]
        raise BackendError("SFX201", f"no value for {node.format_node()}")

    def _constant(self, node: fx.Node) -> torch.Tensor | fx.GraphModule:
        real = getattr(self.traced.module, str(node.target))
        if isinstance(real, (fx.GraphModule, torch.Generator)):  # a branch of torch.cond, retraced by the operator
            return real
        if not isinstance(real, torch.Tensor):
            raise BackendError("SFX201", f"constant {node.target} of type {type(real).__name__}")
        if real.dim() == 0 and self.options.tensor_scalars:
            return torch.full((), real.item(), dtype=real.dtype, device=real.device)
        setattr(self.tracer.root, str(node.target), real)
        fake = self.traced.fake_mode.from_tensor(real, static_shapes=True)
        with compat.below_functionalization():
            compat.track(fake, self.tracer.create_proxy("get_attr", str(node.target), (), {}), self.tracer)
        return compat.to_functional(fake)

    # --- results

    def _drop_unused_numbers(self) -> None:
        """Removes integers that only the host reads, such as the counter of a scheduler."""
        nodes = list(self.tracer.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        unused = {n for n in placeholders if not n.users and isinstance(n.meta.get("val"), torch.SymInt)}
        sizes = [part for node in nodes if node not in unused for part in _numbers_of(node.meta.get("val"))]
        needed = {name for part in sizes for name in compat.symbol_names(part)}
        dropped = {node for node in unused if needed.isdisjoint(compat.symbol_names(node.meta["val"]))}
        self.feeds = [name for name, node in zip(self.feeds, placeholders, strict=True) if node not in dropped]
        for node in dropped:
            self.tracer.graph.erase_node(node)

    def _finish(self, wanted: Iterable[fx.Node]) -> Retraced:
        outputs: list[Any] = []
        made = Retraced(self.feeds, self.numbers.packed, self.options.bases)
        for node in wanted:
            plain = self._result(node)
            made.results[node] = len(outputs)
            outputs.append(plain)
            if isinstance(plain, torch.Tensor):
                made.layouts[node] = (tuple(plain.shape), tuple(plain.stride()), plain.storage_offset())
        failed = None
        if self.flags:
            made.report = len(outputs)
            failed = torch.stack(self.flags).any()
            outputs.append(compat.from_functional(failed))
        updates = [*self._input_updates(made, outputs), *self._base_updates(made, outputs)]
        updates = [(old, self._unless(failed, old, new)) for old, new in updates]
        with compat.below_functionalization():
            for target, new in updates:
                aten.copy_.default(target, new)
            nodes = [self._output_node(value) for value in outputs]
        self.tracer.graph.output(tuple(nodes))
        self._drop_unused_numbers()
        made.feeds = self.feeds
        made.module = compat.late_module(self.tracer.root, self.tracer.graph)
        return made

    def _result(self, node: fx.Node) -> Any:
        """Returns a node's value as an output of the graph."""
        value = self.env[node]
        if isinstance(value, TensorScalar):
            value = value.value
        elif isinstance(value, torch.Tensor):
            made = compat.from_functional(value)
            if (made.is_neg(), made.is_conj()) != _bits(node.meta.get("val")):  # an alias of another one
                value = aten.clone.default(value)
                made = compat.from_functional(value)
            value = layouts.like_captured(value, tuple(made.stride()), node.meta.get("val"))
        return compat.from_functional(value)

    def _input_updates(self, made: Retraced, outputs: list[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Notes the inputs that the graph changes; yields those that it writes itself, with their new values."""
        for i, node in enumerate(self.placeholders):
            value = self.env.get(node)
            if node not in self.fakes or value is None:
                continue
            if compat.storage_replaced(value):
                raise BackendError("SFX201", f"the step replaces the storage of {self.traced.inputs[i].source}")
            layout = self._new_layout(i)
            moved = compat.has_metadata_mutation(value) and layout is not None
            if moved:
                assert layout is not None, "its layout has changed"
                made.metadata[i] = layout
            if not compat.has_data_mutation(value):
                continue
            if moved or node in self.options.defer:
                made.final[f"a{i}"] = len(outputs)
                outputs.append(compat.from_functional(value))
            else:
                made.mutated.append(i)
                yield self.fakes[node], compat.from_functional(value)

    def _base_updates(self, made: Retraced, outputs: list[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same for inputs that share storages, and for these."""
        for i in self.members:
            layout = self._new_layout(i)
            if layout is not None:
                made.metadata[i] = layout
        for i, (base, value) in enumerate(zip(self.options.bases, self.base_values, strict=True)):
            new = compat.from_functional(value)
            if not compat.has_data_mutation(value):
                continue
            if any(self.placeholders[m] in self.options.defer for m in base.members):
                made.final[f"b{i}"] = len(outputs)
                outputs.append(new)
            else:
                made.mutated_bases.append(i)
                yield self.base_fakes[i], new

    def _unless(self, failed: torch.Tensor | None, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Returns the value to write to an input: its old one where a condition of the graph did not hold."""
        if failed is None:
            return new
        with compat.below_functionalization():
            return torch.where(compat.from_functional(failed), old, new)

    def _new_layout(self, position: int) -> Layout | None:
        """Returns an input's new layout, as captured: functionalization loses strides and offset."""
        last = self.metadata_mutated.get(self.placeholders[position])
        if last is None:
            return None
        end, start = last.meta["val"], self.traced.inputs[position].example
        before = (tuple(start.shape), tuple(start.stride()), 0)
        layout = (tuple(end.shape), tuple(end.stride()), end.storage_offset() - start.storage_offset())
        return None if layout == before else _static(layout, self.traced.inputs[position].source)

    def _output_node(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) or is_scalar(value):
            proxy = self.tracer.unwrap_proxy(value)
            return proxy.node if isinstance(proxy, fx.Proxy) else value
        return value


def _bits(value: Any) -> tuple[bool, bool]:
    """Returns (is negative, is conjugate) of a tensor in memory."""
    return (value.is_neg(), value.is_conj()) if isinstance(value, torch.Tensor) else (False, False)


def _with_bits(value: Any, made: torch.Tensor) -> Any:
    """Makes a strided view conjugate and negative like ``made``."""
    value = value.conj() if made.is_conj() else value
    return aten._neg_view.default(value) if made.is_neg() else value


def _static(layout: tuple[Any, Any, Any], source: str) -> Layout:
    size, stride, offset = layout
    if not all(isinstance(n, int) for n in (*size, *stride, offset)):
        raise BackendError("SFX201", f"the step changes the layout of {source}, whose size is symbolic")
    return layout


def _numbers_of(value: Any) -> list[Any]:
    """Returns the symbolic numbers that a value is, or has as sizes and strides."""
    if isinstance(value, (list, tuple)):
        return [part for each in value for part in _numbers_of(each)]
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        value = [*value.shape, *value.stride(), value.storage_offset()]
        return [part for part in value if isinstance(part, compat.SYMBOLS)]
    return [value] if isinstance(value, compat.SYMBOLS) else []
