"""Tape of a recorded backward: which operations belong to which autograd node, and the gradients between the nodes.

A backward recorded as one graph has no derivative for values between its nodes. The tape keeps the node boundaries, so
that :mod:`~sidefx_train.compile.autograd.higher_order` can run it node by node: differentiably, and with gradients that
arrive at saved tensors in a second backward.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.artifacts import SAME
from sidefx_train.compile.graph.view_chains import gradient_edge
from sidefx_train.compile.ops.registration import UNDIFFERENTIABLE
from sidefx_train.compile.residual.native_functions import Place

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.tracer import GraphTracer

aten = torch.ops.aten

_FACTORIZED = (aten._linalg_solve_ex.default, aten._linalg_det.default, aten._linalg_slogdet.default)

Edge = tuple[Any, int]

NOWHERE = -1
"""Placeholder for an edge number: no gradient arrives there."""


@dataclass(frozen=True)
class NodeBackward:
    """Recorded backward of one autograd node.

    Attributes:
        inputs: edge numbers of the node's outputs; :data:`NOWHERE` for one without a gradient, or whose gradient is
            passed outside.
        given: graph node of the gradient of each of them; ``None`` if there was none.
        nodes: the operations, hooks included, in order.
        results: (edge number, graph node of the gradient) for each gradient it passes on.
        unused: it lies on no path from the results, but on one from a saved tensor.
    """

    inputs: tuple[int, ...]
    given: tuple[fx.Node | None, ...]
    nodes: tuple[fx.Node, ...]
    results: tuple[tuple[int, fx.Node], ...]
    unused: bool = False


@dataclass(frozen=True)
class Tape:
    """A recorded backward, node by node in engine order.

    Attributes:
        steps: the backward of each autograd node.
        roots: the edge number of each tangent.
        exits: for each gradient that the stage returns, the number of its edge.
        sources: graph nodes of saved tensors, with the number of the edge to their history.
        direct: those of them whose saved tensor has that history itself, with the saved graph node.
        inner: nodes that a second backward does not differentiate: of a recomputation, or inside ``no_grad``.
        root: module with the constants.
        problem: why the backward cannot be differentiated; empty if it can.
    """

    steps: tuple[NodeBackward, ...] = ()
    roots: tuple[int, ...] = ()
    exits: tuple[int, ...] = ()
    sources: dict[fx.Node, int] = field(default_factory=dict)
    direct: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inner: frozenset[fx.Node] = frozenset()
    root: Any = None
    problem: str = ""

    def leading_to(self, asked: set[int]) -> list[bool]:
        """Returns, for each step, whether it contributes to a requested gradient."""
        wanted, found = set(asked), []
        for step in reversed(self.steps):
            found.append(any(edge in wanted for edge, _ in step.results))
            if found[-1]:
                wanted.update(step.inputs)
        return found[::-1]


@dataclass(frozen=True)
class _Run:
    """An autograd node that ran: its gradients, and the last graph node before and after it."""

    node: Any
    before: fx.Node
    incoming: tuple[fx.Node | None, ...]
    copies: tuple[fx.Node, ...]
    after: fx.Node
    outgoing: tuple[fx.Node | None, ...]


class TapeRecorder:
    """Records the engine's actions while a backward is recorded.

    Args:
        tracer: records the operations.
        roots: edges at which the backward begins.
        grad_inputs: edges at which it ends, with the target of the gradient.
        leaves: edges of outside leaves, by the ``id`` of their shadows.
    """

    def __init__(
        self, tracer: GraphTracer, roots: list[Edge], grad_inputs: dict[Edge, Place], leaves: dict[int, Edge]
    ) -> None:
        self.leaves = leaves
        self.tracer = tracer
        self.roots = roots
        self.grad_inputs = grad_inputs
        self.begin = tracer.last_node()
        self.runs: list[_Run] = []
        self.open: list[tuple[Any, fx.Node, tuple[fx.Node | None, ...], tuple[fx.Node, ...]]] = []
        self.histories: dict[fx.Node, list[Any]] = {}  # edges, and leaves whose edges are looked up later
        self.inner: set[fx.Node] = set()
        self.problem = ""
        self.switched_off = 0  # how often Python code in the backward has entered no_grad
        self.may_ask = False  # may query whether autograd is on: a context manager does so when entered or left
        self.unused: tuple[TapeRecorder, list[fx.Node]] | None = None

    def unreached(self) -> list[Edge]:
        """Returns edges to the history of saved tensors that get no gradient: copies, results that nothing else
        uses."""
        met = {(run.node, number) for run in self.runs for number, grad in enumerate(run.incoming) if grad is not None}
        edges = dict.fromkeys(edge for known in self.histories.values() for edge in known if type(edge) is tuple)
        return [e for e in edges if e not in met and e not in self.grad_inputs and not hasattr(e[0], "variable")]

    def known(self) -> list[Edge]:
        """Returns the edges at which gradients arrive."""
        met = [(run.node, i) for run in self.runs for i, grad in enumerate(run.incoming) if grad is not None]
        return list(dict.fromkeys([*met, *self.grad_inputs]))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context that hooks the engine and the recorded operations."""
        handles, seen = [], set[Any]({None})
        waiting = [node for node, _ in self.roots]
        while waiting:
            node = waiting.pop()
            if node in seen or hasattr(node, "variable"):
                continue
            seen.add(node)
            handles += [node.register_prehook(self._before(node)), node.register_hook(self._after(node))]
            waiting += [after for after, _ in node.next_functions]  # custom functions continue past the ends
        mode = self.tracer.proxy_mode
        mode.observer = self
        try:
            yield
        finally:
            mode.observer = None
            for handle in handles:
                handle.remove()

    def observe(self, operator: Any, args: Any, kwargs: Any) -> None:
        """Records the histories of the arguments of a recorded operation."""
        if self.switched_off or torch.is_grad_enabled():
            self.inner.add(self.tracer.last_node())
            return
        if operator in UNDIFFERENTIABLE:
            self.problem = f"{operator} cannot be differentiated"
        if operator is aten.detach.default:  # its result has no history
            return
        for value in (*args, *(kwargs or {}).values()):
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, torch.Tensor) and each.requires_grad and self.tracer.has_node(each):
                    if each.grad_fn is None and each._is_view() and id(each) not in self.leaves:
                        continue  # made with autograd off: only its base has a history
                    edge = self.leaves.get(id(each), each) if each.grad_fn is None else gradient_edge(each)
                    known = self.histories.setdefault(self.tracer.node_of(each), [])
                    if not any(edge is other or (type(other) is tuple and edge == other) for other in known):
                        known.append(edge)

    def edges(self, node: fx.Node) -> set[Edge]:
        """Returns the edges to the history of a saved tensor."""
        return {edge if type(edge) is tuple else _edge_of_leaf(edge) for edge in self.histories[node]}

    def _node_of(self, grad: torch.Tensor | None) -> fx.Node | None:
        """Returns the graph node of a gradient."""
        if grad is not None and compat.is_wrapper(grad):
            kind = "nested tensors" if compat.is_jagged(grad) else f"a {type(grad).__qualname__}, a tensor subclass"
            self.problem = f"it passes through {kind}"
            return None
        if grad is not None and grad.is_sparse:
            self.tracer.proxy_mode.sparse.refuse_outside()
        return None if grad is None else self.tracer.node_of(grad)

    def _before(self, node: Any) -> Any:
        def hook(grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
            last = self.tracer.last_node()
            found: list[fx.Node | None] = []
            copies: list[fx.Node] = []
            changed = list(grads)
            for i, grad in enumerate(grads):
                at = self._node_of(grad)
                if at is not None and at in found:  # one tensor for two outputs: the operations must distinguish them
                    changed[i] = aten.alias.default(grad)
                    at = self.tracer.node_of(changed[i])
                    at.meta[SAME] = True
                    copies.append(at)
                found.append(at)
            self.open.append((node, last, tuple(found), tuple(copies)))
            return tuple(changed) if copies else None

        return hook

    def _after(self, node: Any) -> Any:
        def hook(grads: tuple[torch.Tensor | None, ...], _: Any) -> None:
            begun, before, incoming, copies = self.open.pop()
            if begun is not node:
                self.problem = "a backward runs inside another"
            outgoing = tuple(map(self._node_of, grads))
            self.runs.append(_Run(node, before, incoming, copies, self.tracer.last_node(), outgoing))

        return hook

    def tape(
        self,
        wanted: dict[fx.Node, None],
        tangents: list[fx.Node],
        grads: list[tuple[Place, fx.Node]],
        direct: dict[fx.Node, tuple[fx.Node, Any]],
    ) -> Tape:
        """Returns the tape after the backward was recorded.

        Args:
            wanted: the operations that the gradients depend on.
            tangents: graph nodes of the gradients at the roots.
            grads: the gradients that the stage returns.
            direct: graph nodes with their saved tensors, and the outside location whose history those keep.
        """
        try:
            made = _Builder(self, wanted, tangents, {}).build(grads, direct)
        except _Unclear as error:
            made = Tape(problem=str(error))
        return replace(made, problem=self.problem) if self.problem else made


def _edge_of_leaf(leaf: torch.Tensor) -> Edge:
    with compat.no_recording(), torch.enable_grad():
        edge = torch.autograd.graph.get_gradient_edge(leaf)
    return edge.node, edge.output_nr


class _Unclear(Exception):
    """The record does not determine which operation belongs to which autograd node."""


class _Builder:
    """Assigns operations to autograd nodes: operations between two nodes are the engine's own additions."""

    def __init__(
        self,
        recorder: TapeRecorder,
        wanted: dict[fx.Node, None],
        tangents: list[fx.Node],
        numbers: dict[Edge, int],
        unused: bool = False,
    ) -> None:
        self.recorder = recorder
        self.wanted = wanted
        self.numbers = numbers
        self.unused = unused
        self.sums: dict[Edge, fx.Node] = {}
        self.contributed: dict[Edge, list[fx.Node]] = {}
        self.pending: list[tuple[Edge, fx.Node]] = []
        self.roots = tuple(self._number(edge) for edge in recorder.roots)
        for edge, tangent in zip(recorder.roots, tangents, strict=True):
            if edge in self.sums:
                raise _Unclear("two results have one gradient")
            self.sums[edge] = tangent

    def _number(self, edge: Edge) -> int:
        return self.numbers.setdefault(edge, len(self.numbers))

    def build(self, grads: list[tuple[Place, fx.Node]], direct: dict[fx.Node, tuple[fx.Node, Any]]) -> Tape:
        recorder = self.recorder
        steps = self.steps()
        wanted, histories = dict(self.wanted), dict(recorder.histories)
        gradient_edges = {node: recorder.edges(node) for node in histories if node in self._read()}
        inner = {node for node in wanted if node.prev in recorder.inner}
        exits = self._exits(grads)
        if recorder.unused is not None:
            other, tangents = recorder.unused
            nodes = dict.fromkeys(node for run in other.runs for node in _nodes_between(run.before, run.after))
            found = _Builder(other, nodes, tangents, self.numbers, unused=True).steps()
            more = [step for step in found if any(edge != NOWHERE for edge in step.inputs)]  # others never run
            steps = [*more, *steps]
            read = {used for step in more for node in step.nodes for used in (node, *node.all_input_nodes)}
            for node in other.histories:
                if node in read:
                    gradient_edges[node] = gradient_edges.get(node, set()) | other.edges(node)
        if any(len(edges) > 1 for edges in gradient_edges.values()):
            raise _Unclear("a tensor is saved with two histories")
        for node in wanted:
            self._check_parts(node, gradient_edges)
        gradient_edge = {node: next(iter(edges)) for node, edges in gradient_edges.items()}
        place_of = recorder.grad_inputs
        roots = dict(zip(recorder.roots, self.roots, strict=True))
        kept = {
            node: direct[node][0]
            for node, edge in gradient_edge.items()
            if node in direct and direct[node][1] in (place_of.get(edge), ("root", roots.get(edge)))
        }
        return Tape(
            tuple(steps),
            self.roots,
            exits,
            {node: self._number(edge) for node, edge in gradient_edge.items()},
            kept,
            frozenset(inner),
            recorder.tracer.tracer.root,
        )

    def _check_parts(self, node: fx.Node, known: dict[fx.Node, Any]) -> None:
        """Refuses formulas that use a factorization of the forward: eager differentiates others."""
        for used in node.all_input_nodes:
            made_by = used.args[0] if used.target is operator.getitem else None
            if isinstance(made_by, fx.Node) and made_by.target in _FACTORIZED and used not in known and used.args[1]:
                raise _Unclear(f"it uses the factorization of {made_by.target}")

    def steps(self) -> list[NodeBackward]:
        """Returns the backward of each autograd node, in the order in which they ran."""
        found: list[NodeBackward] = []
        last = self.recorder.begin
        for run in self.recorder.runs:
            between = self._accumulated(_nodes_between(last, run.before))
            found.append(self._step(run, between))
            last = run.after
        self._accumulated(_nodes_between(last, None))
        return found

    def _read(self) -> set[fx.Node]:
        return {used for node in self.wanted for used in node.all_input_nodes} | set(self.wanted)

    def _accumulated(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Returns the nodes without gradient accumulations, which are recorded."""
        rest = list(nodes)
        for edge, grad in self.pending:
            before = self.sums.get(edge)
            if before is None:
                self.sums[edge] = grad
            elif rest and rest[0].target is aten.add.Tensor and rest[0].args[:2] == (before, grad):
                self.sums[edge] = rest.pop(0)
            else:
                raise _Unclear("gradients are accumulated in an unknown way")
            self.contributed.setdefault(edge, []).append(grad)
        self.pending = []
        return rest

    def _step(self, run: _Run, hooks: list[fx.Node]) -> NodeBackward:
        inputs, given = [], []
        copies = iter(run.copies)
        seen: set[fx.Node] = set()
        for number, grad in enumerate(run.incoming):
            edge = (run.node, number)
            inputs.append(NOWHERE if grad is None or edge in self.recorder.grad_inputs else self._number(edge))
            total = None if grad is None else self.sums.get(edge)
            if total is not None and total in seen:
                if hooks:
                    raise _Unclear("hooks change a gradient shared by two outputs of a node")
                total = next(copies)
            given.append(total)
            seen.add(total) if total is not None else None
        _check_linear(hooks, {node for node in given if node is not None})
        formula = [node for node in _nodes_between(run.before, run.after) if node not in run.copies]
        nodes = tuple(node for node in (*hooks, *formula) if node in self.wanted)
        results: list[tuple[int, fx.Node]] = []
        known = {*self.wanted, *(node for node in given if node is not None)}
        for (after, number), grad in zip(run.node.next_functions, run.outgoing, strict=True):
            if after is None or grad is None:
                continue
            self.pending.append(((after, number), grad))
            if grad in known or grad.op in ("get_attr", "placeholder"):
                results.append((self._number((after, number)), grad))
        return NodeBackward(tuple(inputs), tuple(given), nodes, tuple(results), self.unused)

    def _exits(self, grads: list[tuple[Place, fx.Node]]) -> tuple[int, ...]:
        edge_at = {place: edge for edge, place in self.recorder.grad_inputs.items()}
        found: list[int] = []
        for place, grad in grads:
            edge = edge_at.get(place)
            if edge is None or (grad is not self.sums.get(edge) and grad not in self.contributed.get(edge, ())):
                raise _Unclear("a hook changes a gradient that the part returns")
            found.append(self._number(edge))
        return tuple(found)


_LINEAR = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.neg.default, aten.clone.default, aten.view.default}


def _check_linear(hooks: list[fx.Node], grads: set[fx.Node]) -> None:
    """Refuses nonlinear hooks: in a second backward, parts of a gradient may arrive one by one."""
    made_of = set(grads)
    for node in hooks:
        used = [each for each in node.all_input_nodes if each in made_of]
        if used and (node.target not in _LINEAR or len(used) > 1 or node.args[0] is not used[0]):
            raise _Unclear("a hook changes a gradient other than by a factor")
        if used:
            made_of.add(node)


def _nodes_between(first: fx.Node, last: fx.Node | None) -> list[fx.Node]:
    """Returns the nodes after ``first`` up to ``last``, inclusive; all if that is ``None``."""
    found: list[fx.Node] = []
    if first is last:
        return found
    node = first.next
    while node.op != "root":
        found.append(node)
        if node is last:
            break
        node = node.next
    return [node for node in found if node.op not in ("placeholder", "output")]
