"""Divides the Python numbers of a captured graph by where they can be computed.

*Host* numbers (prologue scalars) depend on scalar inputs, sizes, and 0-dim counters that change only by host arithmetic
(an optimizer's ``step``): the prologue computes them before the graph runs, in Python doubles like eager. *Late*
numbers (epilogue scalars) depend on an ``item()`` of a graph result: if they only leave the step, they are computed
after the graph; if tensors depend on them, they stay tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.source_literals import literal
from sidefx_train.compile.graph.alias_analysis import Aliases
from sidefx_train.compile.graph.artifacts import EXACT_IN_FLOAT32, PREDICATED, GraphInput, is_scalar
from sidefx_train.compile.graph.fx_utils import written_args
from sidefx_train.compile.graph.number_expressions import INFIX, PREFIX, render_number

aten = torch.ops.aten

_COUNTER_OPS = {
    aten.add_.Tensor: "+",
    aten.add.Tensor: "+",
    aten.sub_.Tensor: "-",
    aten.sub.Tensor: "-",
    aten.add_.Scalar: "+",
    aten.add.Scalar: "+",
    aten.mul_.Tensor: "*",
    aten.mul_.Scalar: "*",
    aten.mul.Tensor: "*",
}
_FOREACH_UPDATES = {
    aten._foreach_add_.Scalar: "+",
    aten._foreach_add_.Tensor: "+",
    aten._foreach_mul_.Scalar: "*",
    aten._foreach_mul_.ScalarList: "*",
}
_OF_LAYOUT = {aten.sym_size.int: "size", aten.sym_stride.int: "stride", aten.sym_numel.default: "numel"}
_SAME_VALUE = (aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh_copy.default)
_WRAPPED = {torch.int32: "to_int32", torch.int64: "to_int64"}
_COUNTER_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32)


def is_unknown_size(node: fx.Node) -> bool:
    """Returns True for a size that only the graph knows, since it depends on data."""
    val = node.meta.get("val")
    return node.target in _OF_LAYOUT and isinstance(val, torch.SymInt) and compat.is_unbacked(val)


def is_scalar_node(node: fx.Node) -> bool:
    """Returns True if the node's value is a Python number."""
    if "val" in node.meta:
        return is_scalar(node.meta["val"])
    return node.op == "call_function" and (node.target in INFIX or node.target in PREFIX)


@dataclass
class HostProgram:
    """Straight-line Python over ``a0, a1, ...`` (the inputs) that computes host numbers.

    Attributes:
        lines: variable -> (expression, variables it reads), in dependency order.
        names: node -> variable.
    """

    lines: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    names: dict[fx.Node, str] = field(default_factory=dict)

    def source(self, wanted: Iterable[str]) -> list[str]:
        """Assignments needed for the ``wanted`` variables, in order."""
        needed: set[str] = set()
        stack = list(wanted)
        while stack:
            name = stack.pop()
            if name in self.lines and name not in needed:
                needed.add(name)
                stack.extend(self.lines[name][1])
        return [f"{name} = {expr}" for name, (expr, _) in self.lines.items() if name in needed]


def _constant(node: fx.Node, unchanged: Callable[[fx.Node], bool]) -> float | None:
    """Returns the number in a 0-dim tensor on the CPU that the step makes of a constant, and has not written to."""
    while node.target in _SAME_VALUE and unchanged(node):
        node = node.args[0]  # type: ignore[assignment]
    if not unchanged(node) or node.op != "get_attr" or not isinstance(node.target, str):
        return None
    value = getattr(node.graph.owning_module, node.target, None)
    known = isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu"
    return value.item() if known else None  # type: ignore[union-attr]


def _may_count(tensor: torch.Tensor) -> bool:
    """Returns True for a tensor whose value the host can track: the single element of its storage, on CPU, a real
    number."""
    alone = tensor.dim() == 0 and tensor.untyped_storage().nbytes() == tensor.element_size()
    return alone and tensor.device.type == "cpu" and tensor.dtype in _COUNTER_DTYPES


@dataclass(frozen=True)
class Kept:
    """A counter whose new value is kept only where a flag of the graph is true.

    Attributes:
        flag: the flag.
        value: variable with the new value; the old one is that at entry.
        nodes: the operations that take it back otherwise.
    """

    flag: fx.Node
    value: str
    nodes: frozenset[fx.Node]


@dataclass
class ScalarPlan:
    """Placement of the numbers of a graph.

    Attributes:
        host: the prologue; ``host.names`` has every node it can compute.
        late: number nodes that depend on a tensor computed by the graph.
        sizes: number nodes computed only from the inputs' sizes, strides and numbers of elements.
        counters: variable with the final value of every input that only host arithmetic changes.
        kept: those inputs of which a flag decides whether the new value is kept.
    """

    host: HostProgram
    late: set[fx.Node]
    sizes: set[fx.Node]
    counters: dict[fx.Node, str]
    kept: dict[fx.Node, Kept]


class _Planner:
    def __init__(self, graph: fx.Graph, inputs: tuple[GraphInput, ...], aliases: Aliases) -> None:
        self.host = HostProgram()
        self._by_expression: dict[str, str] = {}
        self.late: set[fx.Node] = set()
        self.sizes: set[fx.Node] = set()
        self.counters: dict[fx.Node, str | None] = {}  # root -> variable with its current value, None: not known
        self.kept: dict[fx.Node, Kept] = {}
        self.written: set[fx.Node] = set()  # roots, by the nodes visited so far
        self.aliases = aliases
        self.functions = compat.host_functions()
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        shared = {node for group in aliases.overlapping for node in group}
        for i, (node, given) in enumerate(zip(placeholders, inputs, strict=True)):
            if given.kind == "scalar":
                self.host.names[node] = f"a{i}"
            elif _may_count(given.example) and node not in shared:
                self.counters[node] = self._define(f"a{i}.item()", ())
        self.entry = dict(self.counters)
        self.position = {node: i for i, node in enumerate(placeholders)}
        steps = (node for node, given in zip(placeholders, inputs, strict=True) if given.counts_steps)
        self.small = {name for name in map(self.counters.get, steps) if name}  # variables with small integers
        for node in graph.nodes:
            if node.op == "call_function":
                self._visit(node)
                self.written |= self.aliases.writes(node)

    def _define(self, expression: str, reads: Iterable[str]) -> str:
        if expression not in self._by_expression:
            name = f"s{len(self.host.lines)}"
            self.host.lines[name] = (expression, tuple(reads))
            self._by_expression[expression] = name
        return self._by_expression[expression]

    def _visit(self, node: fx.Node) -> None:
        if node.target is aten._local_scalar_dense.default:
            value = self._counter_value(node.args[0])
            if value is None:
                self.late.add(node)
            else:
                self.host.names[node] = value
        elif is_scalar_node(node):
            self._number(node)
        elif not self._counter_update(node):
            for root in self.aliases.writes(node):
                if root in self.counters:
                    kept = self._taken_back(node, root)
                    self.counters[root] = None
                    self.kept.pop(root, None)
                    if kept is not None:
                        self.kept[root] = kept

    def _taken_back(self, node: fx.Node, root: fx.Node) -> Kept | None:
        """Returns how a counter gets its new value, or its value at entry, by a flag; ``None`` for other writes."""
        if PREDICATED not in node.meta or root in self.kept:
            return None
        choice: Any = node.args[1]
        flag, _, old = choice.args
        value = self.counters[root]
        if value is None or root not in self.entry or self.counters.get(old) != self.entry[root]:
            return None
        copied = flag if flag.target is aten._to_copy.default else None
        flag = flag if copied is None else copied.args[0]
        return Kept(flag, value, frozenset((old, choice, node)))

    def _number(self, node: fx.Node) -> None:
        if any(a in self.late for a in node.all_input_nodes):
            self.late.add(node)
            return
        if node.target in _OF_LAYOUT:
            tensor: Any = node.args[0]
            if tensor not in self.position:
                if is_unknown_size(node):
                    self.late.add(node)
            else:
                method = _OF_LAYOUT[node.target]
                rest = ", ".join(map(repr, node.args[1:]))
                self.host.names[node] = self._define(f"a{self.position[tensor]}.{method}({rest})", ())
                self.sizes.add(node)
            return
        if node.all_input_nodes and self.sizes.issuperset(node.all_input_nodes):
            self.sizes.add(node)
        if not all(a in self.host.names for a in node.all_input_nodes):
            return
        text = self.render(node, self.host.names)
        if text is not None:
            self.host.names[node] = self._define(text, [self.host.names[a] for a in node.all_input_nodes])

    def render(self, node: fx.Node, names: dict[fx.Node, str]) -> str | None:
        return render_number(node, names, self.functions)

    def _counter_value(self, arg: Any) -> str | None:
        if not isinstance(arg, fx.Node):
            return None
        if len(self.aliases.roots[arg]) != 1:
            return None
        (root,) = self.aliases.roots[arg]
        if root not in self.counters or arg.meta["val"].dtype is not root.meta["val"].dtype:  # a view of the bits
            return None
        return self.counters[root]

    def _operand(self, value: Any) -> str | None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return literal(value)
        if isinstance(value, fx.Node):
            return self.host.names.get(value) or self._counter_value(value)
        return None

    def _operands_of_list(self, node: fx.Node) -> list[str | None]:
        """Returns what an update of several counters adds to each, or multiplies each by."""
        tensors: Any = node.args[0]
        if isinstance(node.args[1], (list, tuple)):
            return [self._operand(value) for value in node.args[1]]
        added = node.args[1]
        if isinstance(added, fx.Node) and isinstance(added.meta.get("val"), torch.Tensor):
            constant = _constant(added, lambda each: not self.aliases.roots[each] & self.written)
            added = None if constant is None or node.kwargs.get("alpha", 1) != 1 else constant
        return [self._operand(added)] * len(tensors)

    def _counter_update(self, node: fx.Node) -> bool:
        """Tracks ``counter += number`` and ``*=``; returns True if the effect on every counter is known."""
        if node.target in _SAME_VALUE:
            value = self._counter_value(node.args[0])
            if value is not None and node in self.aliases.roots[node]:  # a copy, which may be written to
                self.counters[node] = value
            return True
        if node.target in _FOREACH_UPDATES:
            tensors: Any = node.args[0]
            operands = self._operands_of_list(node)
            if None in operands:
                return False
            for tensor, operand in zip(tensors, operands, strict=True):
                self._advance(tensor, _FOREACH_UPDATES[node.target], operand)  # type: ignore[arg-type]
            return True
        sign = _COUNTER_OPS.get(node.target)
        if sign is None or len(node.args) != 2 or node.kwargs:
            return False
        left, right = self._operand(node.args[0]), self._operand(node.args[1])
        if left is None or right is None or not isinstance(node.args[0], fx.Node):
            return False
        if written_args(node):
            self._advance(node.args[0], sign, right)
        else:
            self.counters[node] = self._result(left, sign, right, node.meta["val"].dtype)
        return True

    def _advance(self, tensor: fx.Node, sign: str, step: str) -> None:
        old = self._counter_value(tensor)
        for root in self.aliases.roots[tensor]:
            if root in self.counters:
                dtype = tensor.meta["val"].dtype
                self.counters[root] = None if old is None else self._result(old, sign, step, dtype)

    def _result(self, left: str, sign: str, right: str, dtype: torch.dtype) -> str:
        """Returns the variable with a sum or product as a kernel of ``dtype`` rounds it."""
        if dtype != torch.float64 and left in self.small and sign in "+-" and _is_small_integer(right):
            made = self._define(f"{left} {sign} {right}", (left,))
            self.small.add(made)
            return made
        expression = f"{left} {sign} {right}"
        if dtype == torch.float32:
            expression = f"to_float32(to_float32({left}) {sign} to_float32({right}))"
        elif dtype in _WRAPPED:
            expression = f"{_WRAPPED[dtype]}({expression})"
        return self._define(expression, (left, right))


def _is_small_integer(text: str) -> bool:
    """Returns True for a literal whose sums with small integers are exact in float32."""
    try:
        return float(text).is_integer() and abs(float(text)) < EXACT_IN_FLOAT32
    except ValueError:
        return False


def plan_scalars(graph: fx.Graph, inputs: tuple[GraphInput, ...], aliases: Aliases) -> ScalarPlan:
    """Places the number nodes of a captured graph."""
    planner = _Planner(graph, inputs, aliases)
    ends = {root: planner.counters[root] for root in planner.entry}
    changed = {root: name for root, name in ends.items() if name and planner.entry[root] != name}
    return ScalarPlan(planner.host, planner.late, planner.sizes, changed, planner.kept)


@dataclass(frozen=True)
class HostCounters:
    """Counters that the runner sets after the graph, which has no operation of theirs.

    Attributes:
        nodes: their updates in the captured graph.
        values: variable with the final value, by input.
        flags: those inputs that get it only where a flag is true: the flag.
    """

    nodes: frozenset[fx.Node] = frozenset()
    values: dict[fx.Node, str] = field(default_factory=dict)
    flags: dict[fx.Node, fx.Node] = field(default_factory=dict)


def host_counters(graph: fx.Graph, plan: ScalarPlan, aliases: Aliases) -> HostCounters:
    """Returns the counters on the CPU that only the host reads and changes: a graph on an accelerator is better
    without them."""
    left = set(plan.counters) | set(plan.kept)
    taken_back = {node: root for root, kept in plan.kept.items() for node in kept.nodes}
    inputs = frozenset(n for n in graph.nodes if n.op == "placeholder" and not is_scalar_node(n))
    touched = {n: (aliases.reads(n) | aliases.writes(n)) & inputs for n in graph.nodes if n.op == "call_function"}
    while True:
        nodes = {n: roots for n, roots in touched.items() if roots & left}
        counts = {n for n in nodes if _only_counts(n) or taken_back.get(n) in left}
        mixed = {root for n, roots in nodes.items() if not (n in counts and roots <= left) for root in roots}
        if not mixed & left:
            break
        left -= mixed
    kept = {root: each for root, each in plan.kept.items() if root in left}
    skipped = {n for n in nodes if n.target in _COUNTER_OPS or n.target in _FOREACH_UPDATES}
    skipped.update(*(each.nodes for each in kept.values()))
    skipped |= {n for n in graph.nodes if n.target is aten._to_copy.default and n.users and skipped.issuperset(n.users)}
    values = {root: name for root, name in plan.counters.items() if root in left}
    values |= {root: each.value for root, each in kept.items()}
    return HostCounters(frozenset(skipped), values, {root: each.flag for root, each in kept.items()})


def _only_counts(node: fx.Node) -> bool:
    """Returns True for an update of counters, and for what the host does with their values."""
    if node.target in (aten._local_scalar_dense.default, aten.detach.default, aten.alias.default):
        return True
    is_update = node.target in _COUNTER_OPS and bool(written_args(node))
    return is_update or node.target in _FOREACH_UPDATES
