"""Converts a captured graph to one without in-place operations.

synthetic_bases     inputs that overlap in memory
alias_analysis      which nodes share storage (``graph/``)
scalar_placement    which numbers the host computes, and when
optimizer_tail      fused optimizer calls that run after the graph
error_hazards       what may raise, and which updates must wait for it
retrace/            the functional graph itself
fused_optimizers, tensor_scalar_ops, op_rewrites   operations rewritten during the retrace
check               invariants of the result
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.functionalization.error_hazards import (
    deferred_mutations,
    factorizes,
    find_raising_ops,
    raises_on_index,
    wait_for_losses,
)
from sidefx_train.compile.functionalization.input_views import refuse_unsupported, view_bits, view_layout
from sidefx_train.compile.functionalization.number_arithmetic import wide_numbers
from sidefx_train.compile.functionalization.optimizer_tail import Tail, find_tail
from sidefx_train.compile.functionalization.retrace.options import RetraceOptions
from sidefx_train.compile.functionalization.retrace.retracer import Retraced, Retracer
from sidefx_train.compile.functionalization.scalar_placement import (
    HostCounters,
    ScalarPlan,
    host_counters,
    is_scalar_node,
    is_unknown_size,
    plan_scalars,
    render_number,
)
from sidefx_train.compile.functionalization.synthetic_bases import find_bases
from sidefx_train.compile.graph.alias_analysis import Aliases, drop_dead
from sidefx_train.compile.graph.artifacts import OWN, FunctionalGraph, Name, Output, TailCall, TracedGraph
from sidefx_train.compile.graph.collectives import communicates, issued
from sidefx_train.compile.graph.devices import accelerator_of
from sidefx_train.compile.graph.validation import check_functional, check_graph
from sidefx_train.compile.graph.view_chains import way_up
from sidefx_train.compile.ops.runtime_assert import conditions
from sidefx_train.errors import BackendError

__all__ = ["functionalize"]


def functionalize(
    traced: TracedGraph,
    *,
    decompositions: Any = None,
    tensor_scalars: bool,
    keep_fused: bool = True,
    channels_last: bool = False,
    instead: Mapping[fx.Node, Callable[..., Any]] | None = None,
) -> FunctionalGraph:
    """Removes in-place operations and views of written inputs.

    Args:
        decompositions: operator -> decomposition, applied during the retrace.
        tensor_scalars: changing numbers become 0-dim tensors of one scalar buffer (Inductor), or stay Python numbers.
        channels_last: run convolutions on channels-last images.
        instead: replacement of the operation of a node.
        keep_fused: keep fused optimizer calls if they can run after the graph.

    Raises:
        BackendError: the graph contains an unsupported operation; the message names it.
    """
    graph = traced.module.graph
    drop_dead(graph, raises_on_index)
    wait_for_losses(graph)
    aliases = Aliases(graph)
    refuse_unsupported(traced)
    written = set[fx.Node]().union(*(aliases.writes(n) for n in graph.nodes if n.op == "call_function"))
    bases = find_bases(traced, aliases, written)
    plan = plan_scalars(graph, traced.inputs, aliases)
    tail = find_tail(graph, aliases) if keep_fused else Tail()
    hazards = find_raising_ops(graph, aliases)
    guarded = hazards.uses if tensor_scalars else {}
    left = tuple(node for node in hazards.unchecked if node not in guarded)
    counters = HostCounters()
    if accelerator_of(graph) is not None:
        counters = host_counters(graph, plan, aliases)
    if communicates(graph) and conditions(graph):
        raise BackendError("SFX201", "a graph with collectives assumes conditions: it could not run again eagerly")
    waiting = deferred_mutations(graph, aliases, left)
    checks_numbers = tensor_scalars and accelerator_of(graph) is None and not communicates(graph)
    wide = wide_numbers(plan.late) if checks_numbers else frozenset()
    assumes, factorized = bool(conditions(graph) or wide), factorizes(graph)
    # Generated code selects the old value in the loop that writes: a deferred update is written, and copied, once more.
    predicated = tensor_scalars and not left and accelerator_of(graph) is None
    if (guarded or assumes or factorized) and not predicated:
        waiting = {n for n in graph.nodes if n.op == "placeholder"}
    skip, defer = frozenset(tail.nodes) | counters.nodes, frozenset(waiting)
    options = RetraceOptions(
        decompositions,
        tensor_scalars,
        skip,
        defer,
        channels_last,
        aliases.same,
        guarded,
        bases,
        aliases.roots,
        written,
        instead or {},
        wide,
    )
    layout = _Assembler(traced, aliases, plan, tail, counters)
    retraced = Retracer(traced, plan, options).run(layout.wanted())
    result = replace(layout.assemble(retraced, hazards.checks, not left), assumes=assumes, factorized=factorized)
    check_functional(result)
    if issued(graph) != issued(result.module.graph):
        raise BackendError("SFX204", "functionalization changed the collectives of the graph")
    check_graph("functionalization", result.module, traced.fake_mode, result.feeds, functional=True)
    return result


class _Assembler:
    """Determines the results of the graph and how the runner makes the step's outputs from them."""

    def __init__(
        self, traced: TracedGraph, aliases: Aliases, plan: ScalarPlan, tail: Tail, counters: HostCounters
    ) -> None:
        self.traced = traced
        self.aliases = aliases
        self.plan = plan
        self.tail = tail
        self.counters = counters
        graph = traced.module.graph
        self.position = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
        self.outputs: tuple[Any, ...] = tuple(next(iter(reversed(graph.nodes))).args[0])  # type: ignore[arg-type]
        self.late_names: dict[fx.Node, str] = {}

    def wanted(self) -> list[fx.Node]:
        """Returns the traced nodes whose values the graph must return."""
        found: dict[fx.Node, None] = {}
        for out in self.outputs:
            if isinstance(out, fx.Node):
                for node in self._needs(out):
                    found[node] = None
        for call in self.tail.nodes:
            for arg in call.all_input_nodes:
                for node in self._needs(arg):
                    found[node] = None
        return list(found | dict.fromkeys(self.counters.flags.values()))

    def _needs(self, node: fx.Node) -> list[fx.Node]:
        """Returns the graph results from which the runner makes ``node``."""
        if is_scalar_node(node):
            if node in self.plan.host.names:
                return []
            if node.target is torch.ops.aten._local_scalar_dense.default or is_unknown_size(node):
                return [node]
            if node in self.plan.late:
                return [n for a in node.all_input_nodes for n in self._needs(a)]
            return [node]
        if node in self.tail.nodes or self._input_of(node) is not None:
            return [] if self._is_input(node) else [node] if node not in self.tail.nodes else []
        return [node]

    def _input_of(self, node: fx.Node) -> int | None:
        """Returns the position of the input whose storage a node's value shares."""
        roots = self.aliases.roots[node]
        if len(roots) != 1:
            return None
        return self.position.get(next(iter(roots)))

    def _is_input(self, node: fx.Node) -> bool:
        return self.aliases.same[node].op == "placeholder"

    def assemble(self, retraced: Retraced, checks: Any, covered: bool) -> FunctionalGraph:
        self.retraced = retraced
        late_lines: list[str] = []
        outputs = tuple(self._output(out, late_lines) for out in self.outputs)
        calls = tuple(self._tail_call(node, late_lines) for node in self.tail.nodes)
        names = set(retraced.packed) | {f for f in retraced.feeds if f.startswith("s")}
        names |= {str(o.value) for o in outputs if o.kind == "number"}
        names |= {str(n) for c in calls for n in _names((c.args, tuple(c.kwargs.values())))}
        names |= set(re.findall(r"\bs\d+\b", "\n".join(late_lines)))
        names |= set(self.counters.values.values())
        return FunctionalGraph(
            module=retraced.module,
            inputs=self.traced.inputs,
            results=_results(retraced.module),
            feeds=tuple(retraced.feeds),
            packed=tuple(retraced.packed),
            host=tuple(self.plan.host.source(names)),
            late=tuple(late_lines),
            mutated=tuple(retraced.mutated),
            deferred_copies=tuple((target, f"r{j}") for target, j in retraced.final.items()),
            bases=retraced.bases,
            mutated_bases=tuple(retraced.mutated_bases),
            metadata_updates=tuple((i, *new) for i, new in retraced.metadata.items()),
            tail=calls,
            counters=tuple(
                (self.position[node], name, self._flag(node)) for node, name in self.counters.values.items()
            ),
            device=accelerator_of(retraced.module.graph),
            outputs=outputs,
            checks=tuple(checks),
            report=None if retraced.report is None else f"r{retraced.report}",
            covered=covered,
            communicates=communicates(self.traced.module.graph),
            notes=(f"fused update decomposed: {self.tail.reason}",) if self.tail.reason else (),
        )

    def _flag(self, counter: fx.Node) -> str | None:
        flag = self.counters.flags.get(counter)
        return None if flag is None else f"r{self.retraced.results[flag]}"

    def _output(self, out: Any, late: list[str]) -> Output:
        if not isinstance(out, fx.Node):
            return Output("constant", out)
        if is_scalar_node(out):
            return Output("number", Name(self._number(out, late)))
        if self._is_input(out):
            return Output("result", Name(f"a{self.position[self.aliases.same[out]]}"))
        source = self._input_of(out)
        if source is not None and not (self.traced.gradients and source not in self.retraced.mutated):
            return self._view_of_input(out, self.position.get(way_up(out)[-1], source))
        return Output("result", Name(f"r{self.retraced.results[out]}"), version=out.meta.get(OWN))

    def _view_of_input(self, out: fx.Node, source: int) -> Output:
        size, stride, offset = view_layout(out, self.traced.inputs[source])
        moved = self.retraced.metadata.get(source)  # the input's new offset when the view is made
        if moved is not None:
            offset -= moved[2] * self.traced.inputs[source].example.itemsize // out.meta["val"].itemsize
        layout = size, stride, offset
        return Output("view", Name(f"a{source}"), layout, bits=view_bits(out, self.traced.inputs[source]))

    def _number(self, node: fx.Node, late: list[str]) -> str:
        if node in self.plan.host.names:
            return self.plan.host.names[node]
        if node in self.late_names:
            return self.late_names[node]
        if node.target is torch.ops.aten._local_scalar_dense.default:
            text = f"r{self.retraced.results[node]}"
            if node in self.retraced.layouts:
                text = f"int({text}.item())" if isinstance(node.meta["val"], (int, torch.SymInt)) else f"{text}.item()"
        elif node in self.plan.late and not is_unknown_size(node):
            operands = {a: self._number(a, late) for a in node.all_input_nodes}
            rendered = render_number(node, operands, compat.host_functions())
            if rendered is None:
                return f"r{self.retraced.results[node]}"
            text = rendered
        else:
            return f"r{self.retraced.results[node]}"
        name = f"l{len(late)}"
        late.append(f"{name} = {text}")
        self.late_names[node] = name
        return name

    def _tensor(self, node: Any) -> str:
        same = self.aliases.same[node]
        return f"a{self.position[same]}" if same.op == "placeholder" else f"r{self.retraced.results[node]}"

    def _tail_call(self, node: fx.Node, late: list[str]) -> TailCall:
        def name(arg: fx.Node) -> Name:
            return Name(self._number(arg, late) if is_scalar_node(arg) else self._tensor(arg))

        return TailCall(node.target, _map(node.args, name), _map(dict(node.kwargs), name))


def _results(module: fx.GraphModule) -> tuple[Any, ...]:
    returned = next(iter(reversed(module.graph.nodes))).args[0]
    return tuple(node.meta.get("val") if isinstance(node, fx.Node) else node for node in returned)  # type: ignore[union-attr]


def _map(value: Any, fn: Any) -> Any:
    """Replaces every node in nested arguments."""
    if isinstance(value, fx.Node):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(v, fn) for v in value) if type(value) in (list, tuple) else [_map(v, fn) for v in value]
    if isinstance(value, dict):
        return {k: _map(v, fn) for k, v in value.items()}
    return value


def _names(value: Any) -> list[Name]:
    if isinstance(value, Name):
        return [value]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in _names(v)]
    return []
